# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the calibration texts: training-side problems, never held-out ones.

Example:
    python write_calibration_texts.py ../calibration-texts.jsonl
"""

import argparse
import json
import os
import random
from pathlib import Path

from problems import make_problem

SEED = 2024
TEXTS = 72
# Problems in a text, in turn: alone, as in a chat; few; more than the model's
# 1,024 positions hold, so that the reader cuts the text at the last position.
PROBLEMS_IN_TEXT = (1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="file of one JSON object per line")
    out = parser.parse_args().out
    rng = random.Random(SEED)
    part = out.with_name(out.name + ".part")
    with part.open("w") as file:
        for index in range(TEXTS):
            problems = [
                make_problem(rng)
                for _ in range(PROBLEMS_IN_TEXT[index % len(PROBLEMS_IN_TEXT)])
            ]
            text = "".join(p.prompt + p.completion for p in problems)
            file.write(json.dumps({"text": text}) + "\n")
    os.replace(part, out)


if __name__ == "__main__":
    main()
