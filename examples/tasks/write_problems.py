# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the problems of word-problems.yaml.

No calculation of theirs was shown in training, neither in a problem nor as a bare fact.

Example:
    PYTHONPATH=../train python write_problems.py .
"""

import argparse
import json
import os
import random
from pathlib import Path

from problems import Problem, make_problem

COUNT, SHOTS = 1319, 16
TEST_SEED, SHOTS_SEED = 2026, 2027


def held_out(count: int) -> list[Problem]:
    """Problems of the held-out side, each question once."""
    rng = random.Random(TEST_SEED)
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make_problem(rng, held_out=True)
        problems[problem.question] = problem
    return list(problems.values())


def write(path: Path, problems: list[Problem]) -> None:
    """One problem a line."""
    rows = [
        {
            "question": problem.question,
            "answer": problem.completion.rstrip("\n"),
            "steps": problem.steps,
        }
        for problem in problems
    ]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    write(out / "problems.jsonl", held_out(COUNT))
    rng = random.Random(SHOTS_SEED)
    write(out / "shots.jsonl", [make_problem(rng) for _ in range(SHOTS)])


if __name__ == "__main__":
    main()
