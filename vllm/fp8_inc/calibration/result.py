# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a calibration found."""

import json
from dataclasses import asdict, dataclass, field

from vllm.fp8_inc.calibration.worker import Numbers
from vllm.fp8_inc.formats import FORMATS, Fp8Format


@dataclass
class Calibration:
    """The result, as it is written beside the scales.

    Attributes:
        model: The checkpoint that was measured.
        attention: MLA or MHA.
        made_for: The device whose format the scales fill.
        method: amax, percentile or mse.
        granularity: tensor or head.
        prompts: How many were run.
        tokens: How many were seen.
        growth: Of the largest riser among the maxima, over the last tenth.
        riser: Which it was.
        amax: Layer -> role -> the largest magnitudes seen.
        scaled: Layer -> role -> the magnitudes that meet the format's max.
        softmax_scale: Layer -> what its logits are multiplied with.
        error: Layer -> role -> squared error of the output over its square, with mse.
        gain: Layer -> role -> squared error of the output, mse against amax.
    """

    model: str
    attention: str
    made_for: str
    method: str
    granularity: str
    prompts: int = 0
    tokens: int = 0
    growth: float = 0.0
    riser: str = "none"
    amax: Numbers = field(default_factory=dict)
    scaled: Numbers = field(default_factory=dict)
    softmax_scale: dict[str, float] = field(default_factory=dict)
    error: Numbers = field(default_factory=dict)
    gain: Numbers = field(default_factory=dict)

    @property
    def format(self) -> Fp8Format:
        """Whose max the scales fill."""
        return FORMATS[self.made_for]

    def dequant_scales(self) -> dict[str, dict[str, list[float]]]:
        """Layer -> role, prob too -> dequant scales, one or one a head."""
        maximum = self.format.max
        return {
            layer: {role: [x / maximum for x in amax] for role, amax in roles.items()}
            | {"prob": [1 / maximum]}
            for layer, roles in self.scaled.items()
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"
