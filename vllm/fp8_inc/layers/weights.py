# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Fits FP8 weights and static activation scales to the device that serves."""

import torch

from vllm.fp8_inc.adjustment import ENV, Adjustment
from vllm.fp8_inc.scales import StaticScale, read_dequant_scale

_MAGNITUDE = _NAN = 0x7F


def adjust_weight(
    weight: torch.Tensor,
    dequant_scale: torch.Tensor,
    adjustment: Adjustment,
    layer: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes FP8 weights valid on the device.

    Codes above 240 are infinities and NaN on Gaudi2: weights made for 448 are
    halved there and their scales doubled.

    Args:
        weight: float8_e4m3fn codes of any shape.
        dequant_scale: float32 scales of any shape.
        adjustment: The rule of this checkpoint.
        layer: Name of the layer, for errors.

    Returns:
        Weight and dequant scale, of the same shapes.

    Raises:
        ValueError: If a scale was not loaded or is no positive finite number, or
            if codes remain that the device cannot hold.
    """
    if not (dequant_scale.isfinite() & (dequant_scale > 0)).all():
        bad = dequant_scale[~(dequant_scale.isfinite() & (dequant_scale > 0))]
        raise ValueError(
            f"{layer}.weight_scale is {bad.flatten()[0].item():g}: missing in the "
            "checkpoint, or not a positive finite number. Quantise it again"
        )
    factor = adjustment.weight_factor
    if factor != 1.0:
        halved = weight.float() / factor
        weight = halved.to(torch.float8_e4m3fn)
        dequant_scale = dequant_scale * factor
    largest = (weight.view(torch.uint8) & _MAGNITUDE).amax().item()
    if largest == _NAN:
        raise ValueError(f"{layer}.weight holds NaN. Quantise the checkpoint again")
    if largest > adjustment.served_on.max_code:
        raise ValueError(
            f"{layer}.weight holds the FP8 code {largest:#x}, which is no number on "
            f"{adjustment.served_on.name} (max {adjustment.served_on.max:g}), though "
            f"the checkpoint is taken for one made for it ({adjustment.reason}). "
            f"Correct fp8_dtype_flavor in config.json, or set {ENV}=true"
        )
    return weight, dequant_scale


def static_input_scale(
    dequant_scales: torch.Tensor,
    adjustment: Adjustment,
    dtype: torch.dtype,
    layer: str,
) -> StaticScale:
    """Reduces the input scales of fused projections to the one that covers all.

    Args:
        dequant_scales: float32 [parts], one for each fused projection.
        adjustment: The rule of this checkpoint.
        dtype: Dtype of the activations.
        layer: Name of the layer, for errors.

    Raises:
        ValueError: If a scale was not loaded or is no positive finite number.
    """
    try:
        values = [read_dequant_scale(scale) for scale in dequant_scales.flatten()]
        return StaticScale.from_dequant(max(values) * adjustment.factor, dtype)
    except ValueError as error:
        raise ValueError(
            f"{layer}.input_scale {error} (missing in the checkpoint?). Quantise "
            "the checkpoint again"
        ) from None
