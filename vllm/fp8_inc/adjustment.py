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
    """

    quantised_for: Fp8Format
    served_on: Fp8Format
    reason: str

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
    forced = environ.get(ENV)
    if forced is not None:
        if forced.lower() in ("0", "false"):
            return Adjustment(served_on, served_on, f"{ENV}={forced}")
        if forced.lower() in ("1", "true"):
            other = GAUDI3 if served_on is GAUDI2 else GAUDI2
            return Adjustment(other, served_on, f"{ENV}={forced}")
        raise ValueError(f"{ENV}={forced!r}: use true or false, or unset it")
    flavor = (quantization_config or {}).get(FLAVOR_KEY)
    if flavor is None:
        return Adjustment(GAUDI3, served_on, f"no {FLAVOR_KEY}")
    if not isinstance(flavor, str) or flavor not in _FLAVORS:
        raise ValueError(
            f"config.json: quantization_config.{FLAVOR_KEY} is {flavor!r}; known "
            f"are {sorted(_FLAVORS)}. Correct it, or set {ENV}=true or false"
        )
    return Adjustment(_FLAVORS[flavor], served_on, f"{FLAVOR_KEY} {flavor}")
