# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Differences between arms on the same questions, and what they say."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NORMAL = statistics.NormalDist().inv_cdf(0.975)
_FEWEST = 3


@dataclass(frozen=True)
class Difference:
    """Of two arms, question by question.

    Attributes:
        mean: Arm minus reference.
        half_width: Of the 95 % interval of the mean.
        questions: How many.
    """

    mean: float
    half_width: float
    questions: int

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 0."""
        return abs(self.mean) <= self.half_width

    def verdict(self, higher_is_better: bool) -> str:
        """What it says about the arm."""
        if self.mean == 0 and self.half_width == 0:
            return "equal"
        if self.is_noise:
            return "within noise"
        return "better" if (self.mean > 0) == higher_is_better else "worse"


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t (Abramowitz and Stegun, 26.7.5)."""
    z = _NORMAL
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def paired(arm: Sequence[float], reference: Sequence[float]) -> Difference:
    """The mean difference, with Student's interval.

    Raises:
        ValueError: Unless both have the same questions, three or more.
    """
    if len(arm) != len(reference) or len(arm) < _FEWEST:
        raise ValueError(
            f"{len(arm)} and {len(reference)} answers: a comparison needs the same "
            f"{_FEWEST} or more questions in each arm"
        )
    differences = [a - b for a, b in zip(arm, reference, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = student(len(differences) - 1) * error
    return Difference(statistics.fmean(differences), half, len(differences))


def recovery(
    arm: float, reference: float, higher_is_better: bool = True
) -> float | None:
    """What an arm keeps of the reference's metric, in percent."""
    above, below = (arm, reference) if higher_is_better else (reference, arm)
    return 100 * above / below if below else None
