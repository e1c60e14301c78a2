# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What FP8 weights and activations of a checkpoint become on a device, by ml_dtypes.

Shares no code with the engine. Activations are float32 here, as in the engines that
are compared; block weights pass through bfloat16, as on the device.
"""

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
import torch

BF16 = ml_dtypes.bfloat16
DTYPES = {240.0: ml_dtypes.float8_e4m3, 448.0: ml_dtypes.float8_e4m3fn}


def fake_quantize(
    x: torch.Tensor, dequant_scale: float, maximum: float
) -> torch.Tensor:
    """x -> FP8 -> x, with the product and the reciprocal in the dtype of x.

    Back through a multiplier, not a division: what is quantised once more lies on
    exact ties, which one float32 ulp decides.
    """
    scale = torch.tensor(1 / np.float32(dequant_scale)).to(x.dtype)
    scaled = (x * scale).float().clamp(-maximum, maximum).numpy()
    codes = torch.from_numpy(scaled.astype(DTYPES[maximum]).astype(np.float32))
    return (codes * scale.float().reciprocal()).to(x.dtype)


def quantize_rows(values: np.ndarray, maximum: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows by their own amax: float32 values of the codes, and dequant scales.

    Every operation rounds to the dtype of ``values``, float32 or bfloat16.
    """
    kind = values.dtype.type
    amax = np.abs(values).max(axis=-1, keepdims=True)
    scale = (amax + kind(1e-8)) / kind(maximum)
    scaled = (values * (kind(1) / scale)).astype(np.float32)
    codes = np.clip(scaled, -maximum, maximum).astype(DTYPES[maximum])
    return codes.astype(np.float32), scale.astype(np.float32)


def widen(scale: np.ndarray, rows: int, columns: int, block: int = 128) -> np.ndarray:
    """The scale of every element of a weight in blocks."""
    return np.kron(scale, np.ones((block, block), np.float32))[:rows, :columns]


def requantize_blocks(
    codes: torch.Tensor, scale: torch.Tensor, maximum: float
) -> torch.Tensor:
    """A weight of 128 x 128 blocks as the device has it: one scale for each row."""
    values, scale = codes.float().numpy(), scale.float().numpy()
    if np.abs(values).max() > maximum:
        values = (values / 2).astype(DTYPES[maximum]).astype(np.float32)
        scale = scale * 2
    wide = widen(scale, *values.shape).astype(BF16)
    new, row_scale = quantize_rows(values.astype(BF16) * wide, maximum)
    return torch.from_numpy(new * row_scale)


class WeightOracle:
    """The weights of a checkpoint, and what its layers do to their inputs.

    Args:
        tensors: Of the checkpoint.
        maximum: 240.0 or 448.0, of the device.
        factor: Multiplies input scales (the adjustment rule).
        wrong: Makes a mistake, for a test of the test.

    Attributes:
        plain: float32 weights by name.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        maximum: float,
        factor: float = 1.0,
        wrong: Callable[["WeightOracle"], None] = lambda oracle: None,
    ) -> None:
        self.maximum, self.factor = maximum, factor
        self.plain: dict[str, torch.Tensor] = {}
        self.input_scales: dict[str, float] = {}
        self.dynamic: set[str] = set()
        self.requantize = partial(requantize_blocks, maximum=maximum)
        wrong(self)  # before the weights, and after them
        for name, tensor in tensors.items():
            if name.endswith(".weight"):
                self._add(name.removesuffix(".weight"), tensor, tensors)
        wrong(self)

    def _add(self, name: str, tensor: torch.Tensor, tensors: dict) -> None:
        scale = tensors.get(f"{name}.weight_scale")
        blocks = tensors.get(f"{name}.weight_scale_inv")
        if scale is not None and scale.dim() == 2 and len(scale) < len(tensor):
            blocks = scale
        if blocks is not None:
            self.plain[f"{name}.weight"] = self.requantize(tensor, blocks)
        else:
            self.plain[f"{name}.weight"] = tensor.float() * (
                1 if scale is None else scale
            )
        if f"{name}.input_scale" in tensors:
            self.input_scales[name] = tensors[f"{name}.input_scale"].item()
        elif scale is not None or blocks is not None:
            self.dynamic.add(name)

    def input(self, x: torch.Tensor, names: list[str]) -> torch.Tensor:
        """What projections of these names, which are fused, multiply with."""
        if self.dynamic.issuperset(names):
            codes, scale = quantize_rows(x.numpy(), self.maximum)
            return torch.from_numpy(codes * scale)
        scales = [self.input_scales[n] for n in names if n in self.input_scales]
        if not scales:
            return x
        return fake_quantize(x, max(scales) * self.factor, self.maximum)

    def hook(self, module: torch.nn.Module, names: list[str]) -> None:
        """Quantises the input of ``module``."""
        module.register_forward_pre_hook(
            lambda _, args: (self.input(args[0], names), *args[1:])
        )
