# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the problems of word-problems.yaml.

Held-out questions whose numbers no training problem has together: the training data
is generated again, from its seed, and looked through. (The training's lists of bare
facts, such as 23+45=68., hold nearly every pair of two numbers; that cannot be helped.)

Example:
    PYTHONPATH=../train python write_problems.py ../tiny-deepseek-v2 .
"""

import argparse
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import batches
from problems import Problem, make_problem
from train import SEED, schedule
from transformers import AutoTokenizer

COUNT, SHOTS = 1319, 16
TEST_SEED, SHOTS_SEED = 2026, 2027


def numbers(problem: Problem) -> tuple[int, ...]:
    """Those of the question, in its order."""
    return tuple(map(int, re.findall(r"\d+", problem.question)))


def training_problems(checkpoint: Path) -> list[Problem]:
    """Every problem that the model was trained on.

    Args:
        checkpoint: Of the trained model; where a sequence ends depends on its tokens.
    """
    seen: list[Problem] = []

    def noted(rng: random.Random) -> Problem:
        seen.append(make_problem(rng))
        return seen[-1]

    with mock.patch.object(batches, "make_problem", noted):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        source = batches.BatchSource(tokenizer, SEED + 1)
        for rows, length in schedule():
            source.batch(rows, length)
    return seen


def unseen(trained: list[Problem]) -> Iterator[Problem]:
    """Endless held-out problems, each question once."""
    rng = random.Random(TEST_SEED)
    known = set(map(numbers, trained))
    asked: set[str] = set()
    while True:
        problem = make_problem(rng, held_out=True)
        if numbers(problem) not in known and problem.question not in asked:
            asked.add(problem.question)
            yield problem


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
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    problems = unseen(training_problems(args.checkpoint))
    write(args.out / "problems.jsonl", [next(problems) for _ in range(COUNT)])
    rng = random.Random(SHOTS_SEED)
    write(args.out / "shots.jsonl", [make_problem(rng) for _ in range(SHOTS)])


if __name__ == "__main__":
    main()
