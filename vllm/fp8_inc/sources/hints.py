# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales that can be loaded and that no calibration gives."""

import math
from collections.abc import Mapping

from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.store import FoundScale


def implausible(found: Mapping[str, Mapping[Role, FoundScale]]) -> str | None:
    """Says what is odd about the k and v scales of all layers, with numbers.

    Args:
        found: Layer -> role -> scale, each layer with k and v.
    """
    pairs = [(r["k"].dequant_scale, r["v"].dequant_scale) for r in found.values()]
    if not pairs:
        return None
    clamped = sum(1.0 in pair for pair in pairs)
    if clamped and min(map(min, pairs)) == 1.0:
        return (
            f"k or v has dequant_scale exactly 1.0 in {clamped} of {len(pairs)} "
            "layers and none is below: not calibrated, or clamped, as ModelOpt "
            "before 0.43 did (an amax below 448 then uses a part of FP8's range). "
            "Export the checkpoint again"
        )
    if len(pairs) > 1 and len(set(pairs)) == 1:
        k, v = pairs[0]
        return (
            f"all {len(pairs)} layers have the same scales (k {k:g}, v {v:g}); a "
            "calibration gives each layer its own"
        )
    return None


def rounded_to_bfloat16(
    found: Mapping[str, Mapping[Role, FoundScale]],
) -> str | None:
    """Says that all scales were stored in bfloat16, where that rounded them.

    Args:
        found: Layer -> role -> scale.
    """
    values = [
        value
        for roles in found.values()
        for scale in roles.values()
        if not scale.reciprocal
        for value in scale.values
    ]
    mantissas = [math.frexp(value)[0] * 2**8 for value in values]
    exact = all(m == int(m) for m in mantissas)
    if not values or not exact or set(mantissas) == {2.0**7}:
        return None  # powers of two need no rounding
    return (
        f"all {len(values)} dequant scales are bfloat16 numbers, as in a checkpoint "
        "that stores them in the dtype of the model: up to 0.4 % from amax / max, so "
        "that values as close to amax may saturate"
    )
