# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""From an amax to a dequant scale, rounded at each step as INC does.

Formula of neural-compressor-pt 3.10 (scale_methods): s = amax / (fullscale * backoff)
in hp_dtype; POW2 takes 2^ceil(log2 s); HW_ALIGNED the next power that the device's
matrix engine applies for free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.sources.inc.rules import ScaleRule


@dataclass(frozen=True)
class HardwareScales:
    """The scales that cost nothing: 2^e, e from lowest to highest in steps."""

    step: int
    lowest: int
    highest: int


HARDWARE = {
    "gaudi2": HardwareScales(step=4, lowest=-8, highest=4),
    "gaudi3": HardwareScales(step=1, lowest=-55, highest=7),
}


def dequant_scales(
    amax: Sequence[float], rule: ScaleRule, device: str, dtype: torch.dtype
) -> list[float]:
    """Computes the dequant scales of measured tensors.

    Args:
        amax: Largest magnitude of each tensor.
        rule: Of the modules that the tensors belong to.
        device: ``gaudi2`` or ``gaudi3``: its full scale and its hardware scales.
        dtype: hp_dtype of the configuration; every step is rounded to it.

    Returns:
        Of each tensor s with x = q * s and q = x / s.
    """
    if rule.scale_value_type == "FIXED_VALUE":
        return [fixed_scale(rule, device)] * len(amax)
    largest = torch.tensor(amax, dtype=dtype, device="cpu")
    return round_scale(_raw(largest, rule, device), rule, device).tolist()


def weight_dequant_scales(
    weight: torch.Tensor, rule: ScaleRule, device: str, dtype: torch.dtype
) -> torch.Tensor:
    """Computes the dequant scale of a weight by a MAXABS or fixed rule.

    Args:
        weight: [outputs, inputs], any floating dtype.
        rule: The weight rule of the module.
        device: As in ``dequant_scale``.
        dtype: As in ``dequant_scale``.

    Returns:
        [] (PTS) or [outputs] (PCS) in ``dtype``.

    Raises:
        ValueError: For an OPT rule, which INC evaluates on the device only.
    """
    if rule.scale_value_type == "FIXED_VALUE":
        return torch.tensor(fixed_scale(rule, device), dtype=dtype)
    if rule.scale_value_type == "OPT":
        raise ValueError(
            "a weight scale of the smallest error (OPT) is found on the device only; "
            "keep the cached scale file, or take a MAXABS scale_method"
        )
    if rule.granularity == "PTS":
        raw = _raw(weight.abs().max().to(dtype), rule, device)
        return round_scale(raw, rule, device)
    raw = _raw(weight.abs().amax(dim=1), rule, device).to(dtype)
    floor = torch.tensor(torch.finfo(torch.bfloat16).tiny, dtype=dtype)
    return round_scale(torch.maximum(raw, floor), rule, device)


def _raw(amax: torch.Tensor, rule: ScaleRule, device: str) -> torch.Tensor:
    return amax / (FORMATS[device].max * rule.backoff)


def round_scale(scale: torch.Tensor, rule: ScaleRule, device: str) -> torch.Tensor:
    """Rounds dequant scales of any shape up to what ``rule`` allows."""
    if rule.rounding_method == "IDENTITY":
        return scale
    power = torch.exp2(torch.ceil(torch.log2(scale)))
    if rule.rounding_method == "POW2":
        return power
    if rule.rounding_method != "HW_ALIGNED":
        raise ValueError(f"{rule.rounding_method} rounds no amax")
    hardware = HARDWARE[device]
    exponent = torch.ceil(torch.log2(power) / hardware.step) * hardware.step
    # Of an amax of 0 the exponent is -inf.
    return torch.exp2(exponent.clamp(hardware.lowest, hardware.highest))


def fixed_scale(rule: ScaleRule, device: str) -> float:
    """The dequant scale of a rule that looks at no tensor."""
    if rule.rounding_method == "HW_ALIGNED_FIXED":
        return 2.0 ** HARDWARE[device].highest
    return 1.0
