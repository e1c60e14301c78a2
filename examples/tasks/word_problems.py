# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The data of word-problems.yaml, from the files beside it."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

_FILES = {"train": "shots.jsonl", "test": "problems.jsonl"}


def load(**_: Any) -> dict[str, Dataset]:
    """Solved problems for the shots, and the problems themselves."""
    return {
        split: Dataset.from_list(
            [json.loads(line) for line in (Path(__file__).parent / name).open()]
        )
        for split, name in _FILES.items()
    }
