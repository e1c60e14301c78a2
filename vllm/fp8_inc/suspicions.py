# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What is odd about scales that load, and what to do about it."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from vllm.fp8_inc.sources.hints import implausible
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.store import FoundScale

Found = Mapping[str, Mapping[Role, FoundScale]]

# An outlier is this many octaves off the median layer, and this many times the
# median distance: amax grows with depth in real models, by up to two octaves.
_OCTAVES = 3.0
_DEVIATIONS = 6.0
_FEWEST = 4
_AGAIN = "calibrate again (`vllm kv-scales calibrate`)"


def suspicions(found: Found, mla: bool, quantization: Mapping[str, Any]) -> list[str]:
    """Says what is odd, one line each.

    Args:
        found: Layer -> role -> scale; layers with k and v only are looked at.
        mla: Whether one latent is cached.
        quantization: quantization_config of config.json.
    """
    whole = {n: roles for n, roles in found.items() if {"k", "v"} <= roles.keys()}
    if not whole:
        return []
    lines = [odd] if (odd := implausible(whole)) else []
    lines += _outliers(whole)
    if mla:
        lines += _uncovered_rope(whole)
    if quantization.get("provider") == "auto-round":
        lines.append(
            "AutoRound keeps the k and v scales of its last calibration batch only; "
            f"their spread over layers is {_spread(whole)}. If in doubt, {_AGAIN}"
        )
    return lines


def _outliers(found: Found) -> list[str]:
    lines = []
    roles: tuple[Role, ...] = ("k", "v")
    for role in roles:
        logs = {n: math.log2(max(r[role].values)) for n, r in found.items()}
        if len(logs) < _FEWEST:
            continue
        middle = statistics.median(logs.values())
        usual = statistics.median(abs(x - middle) for x in logs.values())
        limit = max(_OCTAVES, _DEVIATIONS * usual)
        odd = [n for n, x in logs.items() if abs(x - middle) > limit]
        if odd:
            shown = ", ".join(f"{n} {max(found[n][role].values):.3g}" for n in odd[:5])
            lines.append(
                f"{role}: {len(odd)} outliers against a median of {2**middle:.3g}: "
                f"{shown}. Real models have some (first layers); a layer that saw "
                f"little data looks the same: compare, or {_AGAIN}"
            )
    return lines


def _uncovered_rope(found: Found) -> list[str]:
    keys = {scale.key for roles in found.values() for scale in roles.values()}
    if any(key.endswith("kv_b_proj.output_scale") for key in keys):
        return [
            "kv_b_proj.output_scale was measured on the expanded keys without their "
            "rotary part: k_pe, which is cached with the latent, is not covered; "
            f"{_AGAIN}"
        ]
    if all(roles["k"].values == roles["v"].values for roles in found.values()):
        return [
            "k and v have the same scales in every layer: nothing shows that k_pe, "
            "which is cached with the latent and often larger, was measured; "
            f"{_AGAIN} or compare (`vllm kv-scales compare`)"
        ]
    return []


def _spread(found: Found) -> str:
    largest = [max(roles["k"].values) for roles in found.values()]
    return f"{max(largest) / min(largest):.3g} (k, largest to smallest)"
