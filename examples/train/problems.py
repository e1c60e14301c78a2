# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Arithmetic word problems with worked solutions, and their grading.

Every number is at most 99. Results then have at most two digits, which a model
of three million parameters can learn; with larger numbers the same model picks
up the language and the copying but not the arithmetic.

A document ends with a blank line, which is also the end-of-sequence token, so
that a few-shot prompt is simply several documents and one open question.
"""

import random
import re
import zlib
from dataclasses import dataclass

from problem_kinds import KINDS

MAX_NUMBER = 99
END = "\n\n"
ANSWER_MARK = "####"
STEP_WEIGHTS = (0.25, 0.40, 0.35)  # share of problems of one, two, three steps
HELD_OUT_ONE_IN = 64


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


def is_held_out(question: str) -> bool:
    """Splits by the question's own hash, so no list of questions is kept."""
    return zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0


def make_problem(rng: random.Random, held_out: bool = False) -> Problem:
    """Draws one problem of the wanted side of the split.

    Args:
        rng: Source of all randomness.
        held_out: True for evaluation questions, False for training ones.

    Returns:
        A problem whose numbers are all at most MAX_NUMBER.
    """
    while True:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        steps = rng.choices((1, 2, 3), STEP_WEIGHTS)[0]
        ask, work, answer = kind(rng, steps)
        problem = Problem(" ".join(ask), " ".join(work), answer, steps)
        if is_held_out(problem.question) != held_out:
            continue
        numbers = re.findall(r"\d+", problem.question + problem.solution)
        if max(map(int, numbers)) <= MAX_NUMBER:
            return problem


def grade(text: str, answer: int) -> bool:
    """True if the number after the answer mark is the answer."""
    found = re.search(rf"{ANSWER_MARK}\s*(\d+)", text)
    return found is not None and int(found.group(1)) == answer
