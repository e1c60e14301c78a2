# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The embedded model and its held-out problems, for every benchmark that asks it."""

import random
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BF16 = ROOT / "examples" / "tiny-deepseek-v2"
FP8 = ROOT / "examples" / "tiny-deepseek-v2-fp8"
LONGEST_ANSWER = 90  # tokens


def questions(count: int, shots: int, seed: int) -> list[tuple[str, int]]:
    """Few-shot prompts and their answers, from the held-out side of the split."""
    sys.path.insert(0, str(ROOT / "examples" / "train"))
    from documents import few_shot_prompt

    rng = random.Random(seed)
    drawn = [few_shot_prompt(rng, shots) for _ in range(count)]
    return [(prompt, problem.answer) for prompt, problem in drawn]
