# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""INC's scale methods, as data: which rule a weight and an activation follow."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

UPPER = BeforeValidator(lambda value: value.upper() if type(value) is str else value)

Granularity = Literal["PTS", "PCS"]
ValueType = Literal["MAXABS", "FIXED_VALUE", "OPT"]
Rounding = Literal["IDENTITY", "POW2", "HW_ALIGNED", "HW_ALIGNED_FIXED", "SCALE_UNIT"]


class ScaleRule(BaseModel):
    """How one scale follows from a tensor; the names and defaults are INC's.

    Attributes:
        granularity: One scale per tensor (PTS) or per channel (PCS).
        scale_value_type: From the amax, a fixed value, or the smallest error (OPT).
        rounding_method: What is done with amax / (fullscale * backoff).
        backoff: Part of the FP8 range that the amax fills.
        params: Candidates of OPT, ``{"weight_scales": [...]}``.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    granularity: Annotated[Granularity, UPPER] = "PTS"
    scale_value_type: Annotated[ValueType, UPPER] = "MAXABS"
    rounding_method: Annotated[Rounding, UPPER] = "IDENTITY"
    backoff: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 1.0
    params: dict[str, Any] | None = None

    @property
    def kind(self) -> tuple[Granularity, ValueType, Rounding]:
        """What makes it one of INC's rules; the backoff is free."""
        return self.granularity, self.scale_value_type, self.rounding_method


@dataclass(frozen=True)
class Scheme:
    """The rules of one module.

    Attributes:
        weight: For its weight.
        activation: For its inputs; the KV cache and the query are inputs.
    """

    weight: ScaleRule
    activation: ScaleRule

    @property
    def is_fixed(self) -> bool:
        """Whether no measurement is needed."""
        return {self.weight.scale_value_type, self.activation.scale_value_type} == {
            "FIXED_VALUE"
        }


def _rule(
    rounding: Rounding,
    backoff: float,
    value: ValueType = "MAXABS",
    granularity: Granularity = "PTS",
) -> ScaleRule:
    return ScaleRule(
        granularity=granularity,
        scale_value_type=value,
        rounding_method=rounding,
        backoff=backoff,
    )


def _fixed(rounding: Rounding) -> ScaleRule:
    return _rule(rounding, 1.0, "FIXED_VALUE")


_WEIGHT_HW = _rule("HW_ALIGNED", 0.5)
_WEIGHT_POW2 = _rule("POW2", 0.5)
_WEIGHT_PCS_POW2 = _rule("POW2", 0.5, granularity="PCS")
_WEIGHT_PCS_OPT_POW2 = _rule("POW2", 0.5, "OPT", "PCS")
_INPUT_HW = _rule("HW_ALIGNED", 0.25)
_INPUT_POW2 = _rule("POW2", 0.25)
_INPUT_PCS_POW2 = _rule("POW2", 1.0, granularity="PCS")

METHODS: dict[str, Scheme] = {
    "UNIT_SCALE": Scheme(_fixed("SCALE_UNIT"), _fixed("SCALE_UNIT")),
    "HW_ALIGNED_SINGLE_SCALE": Scheme(
        _fixed("HW_ALIGNED_FIXED"), _fixed("HW_ALIGNED_FIXED")
    ),
    "MAXABS_HW": Scheme(_WEIGHT_HW, _INPUT_HW),
    "MAXABS_POW2": Scheme(_WEIGHT_POW2, _INPUT_POW2),
    "MAXABS_ARBITRARY": Scheme(_rule("IDENTITY", 0.5), _rule("IDENTITY", 0.25)),
    "MAXABS_HW_OPT_WEIGHT": Scheme(_rule("HW_ALIGNED", 0.5, "OPT"), _INPUT_HW),
    "MAXABS_POW2_OPT_WEIGHT": Scheme(_rule("POW2", 0.5, "OPT"), _INPUT_POW2),
    "ACT_MAXABS_HW_WEIGHTS_PCS_MAXABS_POW2": Scheme(_WEIGHT_PCS_POW2, _INPUT_HW),
    "ACT_MAXABS_HW_WEIGHTS_PCS_OPT_POW2": Scheme(_WEIGHT_PCS_OPT_POW2, _INPUT_HW),
    "ACT_MAXABS_POW2_WEIGHTS_PCS_MAXABS_POW2": Scheme(_WEIGHT_PCS_POW2, _INPUT_POW2),
    "ACT_MAXABS_POW2_WEIGHTS_PCS_OPT_POW2": Scheme(_WEIGHT_PCS_OPT_POW2, _INPUT_POW2),
    "ACT_MAXABS_PCS_POW2_WEIGHT_MAXABS_PTS_POW2_HW": Scheme(
        _WEIGHT_HW, _INPUT_PCS_POW2
    ),
    "MAXABS_PCS_POW2": Scheme(_WEIGHT_PCS_POW2, _INPUT_PCS_POW2),
}
DYNAMIC_ONLY = frozenset(
    name for name, scheme in METHODS.items() if scheme.activation.granularity == "PCS"
)
_BY_KIND = {
    (scheme.weight.kind, scheme.activation.kind): name
    for name, scheme in METHODS.items()
}


def method_of(scheme: Scheme) -> str | None:
    """Names the method that ``scheme`` is, whatever its backoffs, or None."""
    return _BY_KIND.get((scheme.weight.kind, scheme.activation.kind))
