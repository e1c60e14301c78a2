# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Arithmetic word problems with worked solutions, their split, and their grading.

Every number is at most 99. Results then have at most two digits, which a model
of three million parameters can learn; with larger numbers the same model picks
up the language and the copying but not the arithmetic.

A document ends with a blank line, which is also the end-of-sequence token, so
that a few-shot prompt is simply several documents and one open question.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from functools import cache

from problem_kinds import KINDS

MAX_NUMBER = 99
END = "\n\n"
ANSWER_MARK = "####"
STEP_WEIGHTS = (0.25, 0.40, 0.35)  # share of problems of one, two, three steps
HELD_OUT_ONE_IN = 8  # sums and differences


@dataclass(frozen=True)
class Problem:
    """One word problem.

    Attributes:
        question: The text after "Question: ".
        solution: The worked solution, without the answer mark.
        answer: The result.
        steps: Number of calculations the solution needs, 1 to 3.
    """

    question: str
    solution: str
    answer: int
    steps: int

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def completion(self) -> str:
        return f" {self.solution} {ANSWER_MARK} {self.answer}{END}"


@cache
def is_held_out(calculation: str) -> bool:
    """True for sums and differences that training never shows, bare or in a problem.

    No product or quotient is: there are so few that a small model knows by heart those
    it was shown, and no others.

    Args:
        calculation: Two operands in their order, such as "23+45"; 45+23 may be on the
            other side. Its own hash decides, so no list is kept.
    """
    if not set(calculation) & set("+-"):
        return False
    digest = hashlib.sha256(calculation.encode()).digest()
    return digest[0] % HELD_OUT_ONE_IN == 0


def calculations(solution: str) -> list[str]:
    """Those of a worked solution, such as "23+45"."""
    return re.findall(r"(\d+[-+*/]\d+)=", solution)


def make_problem(rng: random.Random, held_out: bool = False) -> Problem:
    """Draws one problem of the wanted side of the split.

    Args:
        rng: Source of all randomness.
        held_out: True for evaluation, where every calculation is held out, so that the
            problem adds and subtracts only; False for training, where none is.

    Returns:
        A problem whose numbers are all at most MAX_NUMBER.
    """
    steps = rng.choices((1, 2, 3), STEP_WEIGHTS)[0]
    while True:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        ask, work, answer = kind(rng, steps)
        problem = Problem(" ".join(ask), " ".join(work), answer, steps)
        sides = set(map(is_held_out, calculations(problem.solution)))
        if sides != {held_out}:
            continue
        numbers = re.findall(r"\d+", problem.question + problem.solution)
        if max(map(int, numbers)) <= MAX_NUMBER:
            return problem


def grade(text: str, answer: int) -> bool:
    """True if the number after the answer mark is the answer."""
    found = re.search(rf"{ANSWER_MARK}\s*(\d+)", text)
    return found is not None and int(found.group(1)) == answer
