# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The rule that fits scales made for one Gaudi to the Gaudi that serves.

A dequant scale is amax / max of the format it was made for. Served on another
format it becomes amax / max of that one: dequant_scale x factor.

| Quantised for  | Served on | adjustment | factor    |
|----------------|-----------|------------|-----------|
| Gaudi2 (240)   | Gaudi2    | off        | 1         |
| Gaudi3/GPU 448 | Gaudi2    | on         | 448 / 240 |
| Gaudi3/GPU 448 | Gaudi3    | off        | 1         |
| Gaudi2 (240)   | Gaudi3    | on         | 240 / 448 |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.fp8_inc.formats import GAUDI2, GAUDI3, Fp8Format
from vllm.logger import init_logger

logger = init_logger(__name__)

ENV = "VLLM_SCALE_ADJUSTMENT"
FLAVOR_KEY = "fp8_dtype_flavor"
# Producers write "fnuz" for "quantised against 240"; the bias-8 format of that
# name is not meant.
_FLAVORS = {"float8_e4m3fn": GAUDI3, "float8_e4m3fnuz": GAUDI2}
FLAVOR_OF = {fmt.name: flavor for flavor, fmt in _FLAVORS.items()}


@dataclass(frozen=True)
class Adjustment:
    """How scales are fitted to the device that serves.

    Attributes:
        quantised_for: The format the scales and FP8 weights were made for.
        served_on: The format of the device.
        reason: Where ``quantised_for`` was taken from, for the report.
        heads_for: The format that scales per head were made for, where it is
            another: AutoRound divides by 448 for them, whatever its flavour says.
    """

    quantised_for: Fp8Format
    served_on: Fp8Format
    reason: str
    heads_for: Fp8Format | None = None

    def amax(self, dequant_scale: float, per_head: bool) -> float:
        """The largest magnitude that was seen when the scale was made."""
        heads_for = self.heads_for if per_head else None
        return dequant_scale * (heads_for or self.quantised_for).max

    @property
    def factor(self) -> float:
        """Multiplies every static activation and KV dequant scale."""
        return self.quantised_for.max / self.served_on.max

    @property
    def weight_factor(self) -> float:
        """Multiplies weight dequant scales; the codes are divided by it.

        A power of two, so that the division is exact but for subnormals. FP8
        weights made for 240 are valid on both devices and stay as they are.
        """
        return 2.0 if self.factor > 1 else 1.0


def resolve_adjustment(
    quantization_config: Mapping[str, Any] | None,
    served_on: Fp8Format,
    environ: Mapping[str, str] = os.environ,
) -> Adjustment:
    """Decides for which format a checkpoint was quantised.

    VLLM_SCALE_ADJUSTMENT=false says: for the device that serves; true says: for
    the other one. Without it ``fp8_dtype_flavor`` in quantization_config
    decides; a checkpoint that has none was quantised against 448.

    Raises:
        ValueError: For a flavour or a value of the variable that is not known.
    """
    config = quantization_config or {}
    flavor = config.get(FLAVOR_KEY)
    known = isinstance(flavor, str) and flavor in _FLAVORS
    made_for = GAUDI3 if flavor is None else _FLAVORS[flavor] if known else None
    reason = f"no {FLAVOR_KEY}" if flavor is None else f"{FLAVOR_KEY} {flavor}"
    forced = environ.get(ENV)
    if forced is not None:
        return _forced(forced, served_on, made_for, reason)
    if made_for is None:
        raise ValueError(
            f"config.json: quantization_config.{FLAVOR_KEY} is {flavor!r}; known "
            f"are {sorted(_FLAVORS)}. Correct it, or set {ENV}=true or false"
        )
    quirk = made_for is GAUDI2 and config.get("provider") == "auto-round"
    return Adjustment(made_for, served_on, reason, GAUDI3 if quirk else None)


def _forced(
    value: str, served_on: Fp8Format, made_for: Fp8Format | None, reason: str
) -> Adjustment:
    if value.lower() not in ("0", "false", "1", "true"):
        raise ValueError(f"{ENV}={value!r}: use true or false, or unset it")
    other = GAUDI3 if served_on is GAUDI2 else GAUDI2
    chosen = served_on if value.lower() in ("0", "false") else other
    if made_for not in (None, chosen):
        logger.warning_once(_contradiction(made_for, chosen, reason, value))
    return Adjustment(chosen, served_on, f"{ENV}={value}")


def _contradiction(
    made_for: Fp8Format, chosen: Fp8Format, reason: str, value: str
) -> str:
    share = chosen.max / made_for.max
    effect = (
        f"values above {share:.1%} of the calibrated amax saturate"
        if share < 1
        else f"the calibrated amax takes {1 / share:.1%} of the range"
    )
    return (
        f"fp8_inc: {ENV}={value} takes the scales as made for max {chosen.max:g}, "
        f"but {reason} means {made_for.max:g}; if that is right, {effect}. Unset "
        f"{ENV} unless you know better"
    )
