# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Quantises activations as the device does: by a static scale or per token."""

import torch

from vllm.fp8_inc.formats import Fp8Format

# Keeps the scale of an all-zero row positive; the HPU worker's constant.
_EPSILON = 1e-8


def quantize(
    x: torch.Tensor, quant_scale: torch.Tensor | None, fmt: Fp8Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts activations to FP8.

    Args:
        x: [..., K] activations, bfloat16, float16 or float32.
        quant_scale: 0-d in the dtype of x, q = cast(x * quant_scale); None takes
            the scale of each row from its own amax.
        fmt: The format of the device.

    Returns:
        uint8 codes [..., K], and the dequant scale that undoes the cast: float32,
        0-d or [..., 1].
    """
    if quant_scale is None:
        return quantize_rows(x, fmt)
    # What acts is the rounded quant scale, so that is undone.
    return fmt.cast(x, quant_scale), quant_scale.float().reciprocal()


def quantize_rows(x: torch.Tensor, fmt: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts each row by its own amax, with the arithmetic of the HPU worker.

    dequant_scale = (amax + 1e-8) / max and quant_scale = 1 / dequant_scale, each
    operation rounded to the dtype of x; the product is scaled by that
    dequant_scale (dynamic_quant in extension/ops.py of vllm-gaudi 091bbadd). Where
    float16 would underflow to a scale of 0, its smallest normal number is used.

    Args:
        x: [..., K], bfloat16, float16 or float32: activations or weights.
        fmt: The format of the device.

    Returns:
        uint8 codes [..., K] and float32 dequant scales [..., 1].
    """
    amax = x.abs().amax(-1, keepdim=True)
    dequant_scale = ((amax + _EPSILON) / fmt.max).clamp(min=torch.finfo(x.dtype).tiny)
    return fmt.cast(x, dequant_scale.reciprocal()), dequant_scale.float()
