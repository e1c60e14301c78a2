# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Fits FP8 weights and static activation scales to the device that serves."""

import torch

from vllm.fp8_inc.adjustment import ENV, Adjustment
from vllm.fp8_inc.layers.halving import halve, largest_code
from vllm.fp8_inc.scales import StaticScale, read_dequant_scale

_NAN = 0x7F


def check_scales(dequant_scale: torch.Tensor, key: str) -> None:
    """Refuses scales that are missing or impossible.

    Args:
        dequant_scale: Weight scales of any shape, NaN where none was loaded.
        key: Layer and name of the scale, for errors.

    Raises:
        ValueError: If one was not loaded or is no positive finite number.
    """
    good = dequant_scale.isfinite() & (dequant_scale > 0)
    if not good.all():
        raise ValueError(
            f"{key} is {dequant_scale[~good].flatten()[0].item():g}: missing in the "
            "checkpoint, or not a positive finite number. Quantise it again"
        )


def fit_weight(weight: torch.Tensor, adjustment: Adjustment, layer: str) -> float:
    """Makes FP8 weights valid on the device, in place.

    Codes above 240 are infinities and NaN on Gaudi2. Weights made for 448 that hold
    one are halved there as a whole; others stay as they are, and so does every
    weight whose flavour says that it was made for 240.

    Args:
        weight: Contiguous float8_e4m3fn codes of any shape; halved where needed.
        adjustment: The rule of this checkpoint.
        layer: Name of the layer, for errors.

    Returns:
        What the dequant scales must be multiplied with: 1.0 or 2.0.

    Raises:
        ValueError: If codes remain that the device cannot hold.
    """
    largest = largest_code(weight)
    if largest == _NAN:
        raise ValueError(f"{layer}.weight holds NaN. Quantise the checkpoint again")
    if largest <= adjustment.served_on.max_code:
        return 1.0
    if adjustment.weight_factor != 1.0:
        halve(weight)
        return adjustment.weight_factor
    raise ValueError(
        f"{layer}.weight holds the FP8 code {largest:#x}, which is no number on "
        f"{adjustment.served_on.name} (max {adjustment.served_on.max:g}), though "
        f"the checkpoint is taken for one made for it ({adjustment.reason}). "
        f"Correct fp8_dtype_flavor in config.json, or set {ENV}=true"
    )


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
