# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Documents made of problems: lists of facts, and few-shot prompts."""

import random

from problems import END, MAX_NUMBER, Problem, is_held_out, make_problem

FACTS_PROMPT = "Facts:"
FACTS_PER_DOCUMENT = 10


def _calculation(rng: random.Random) -> tuple[str, int]:
    """Two operands with their sign, and the result."""
    kind = rng.choices(("+", "-", "k*p", "p*k", "/"), (42, 30, 8, 8, 12))[0]
    if kind == "+":
        a = rng.randint(2, 90)
        b = rng.randint(2, MAX_NUMBER - a)
        return f"{a}+{b}", a + b
    if kind == "-":
        a = rng.randint(5, MAX_NUMBER)
        b = rng.randint(2, a - 1)
        return f"{a}-{b}", a - b
    k = rng.randint(2, 9)
    p = rng.randint(2, min(15, MAX_NUMBER // k))
    if kind == "/":
        return f"{k * p}/{k}", p
    return (f"{k}*{p}" if kind == "k*p" else f"{p}*{k}"), k * p


def _fact(rng: random.Random) -> str:
    """A calculation that is not held out, such as "23+45=68."."""
    while True:
        calculation, result = _calculation(rng)
        if not is_held_out(calculation):
            return f"{calculation}={result}."


def facts_completion(rng: random.Random) -> str:
    """The text after FACTS_PROMPT: bare calculations, ten to a document.

    A word problem holds two results among fifty other tokens; a list of facts
    is what teaches arithmetic in a few million tokens.
    """
    facts = " ".join(_fact(rng) for _ in range(FACTS_PER_DOCUMENT))
    return f" {facts}{END}"


def few_shot_prompt(rng: random.Random, shots: int) -> tuple[str, Problem]:
    """Builds one evaluation prompt.

    Args:
        rng: Source of all randomness.
        shots: Number of solved problems before the open one. They are from the
            training side of the split, the open one from the held-out side.

    Returns:
        The prompt, which ends in "Answer:", and the open problem.
    """
    solved = (make_problem(rng) for _ in range(shots))
    context = "".join(p.prompt + p.completion for p in solved)
    problem = make_problem(rng, held_out=True)
    return context + problem.prompt, problem
