# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What each Gaudi computes, by ml_dtypes and numpy: the oracle of the number tests."""

import ml_dtypes
import numpy as np
import torch

MAXIMUM = {"gaudi2": 240.0, "gaudi3": 448.0}
FP8 = {"gaudi2": ml_dtypes.float8_e4m3, "gaudi3": ml_dtypes.float8_e4m3fn}
_BYTES = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
_NUMPY = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: np.uint8}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copies a tensor; bfloat16 becomes ml_dtypes', FP8 its codes."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype not in _BYTES:
        return tensor.numpy()
    return tensor.view(_BYTES[tensor.dtype]).numpy().view(_NUMPY[tensor.dtype])


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def encode(values: np.ndarray, device: str) -> np.ndarray:
    """Codes of the device's saturating cast."""
    values = np.asarray(values).astype(np.float32)
    finite = np.clip(values, -MAXIMUM[device], MAXIMUM[device])
    with np.errstate(invalid="ignore"):
        codes = finite.astype(FP8[device]).view(np.uint8)
    sign = np.signbit(values) if device == "gaudi3" else False
    return np.where(np.isnan(values), np.where(sign, 0xFF, 0x7F), codes).astype("u1")


def decode(codes: np.ndarray, device: str) -> np.ndarray:
    """float64 values of codes."""
    return np.asarray(codes, np.uint8).view(FP8[device]).astype(np.float64)


def cast(x: torch.Tensor, quant_scale: float, device: str) -> np.ndarray:
    """Codes of cast_to_fp8_v2: the product is taken in the dtype of ``x``."""
    values = to_numpy(x)
    with np.errstate(over="ignore", invalid="ignore"):
        return encode(values * np.asarray(quant_scale).astype(values.dtype), device)


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: float,
    device: str,
    weight_format: str = "gaudi3",
) -> np.ndarray:
    """float64 x @ weight.T with the activations on the grid of the device.

    Args:
        x: [tokens, in] activations.
        weight: [out, in] codes, to be multiplied by their scales afterwards.
        input_scale: Dequant scale; its reciprocal acts in the dtype of ``x``.
        device: Whose cast is used.
        weight_format: How the codes of ``weight`` are read.
    """
    quant_scale = torch.tensor(1.0 / input_scale, dtype=torch.float64)
    quant_scale = quant_scale.float().to(x.dtype).double().item()
    activations = decode(cast(x, quant_scale, device), device)
    product = activations @ decode(to_numpy(weight), weight_format).T
    return product / quant_scale
