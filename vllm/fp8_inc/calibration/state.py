# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Where an interrupted calibration goes on."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm.fp8_inc.calibration.worker import Numbers
from vllm.fp8_inc.sources.strict_json import parse_json, read_text
from vllm.fp8_inc.whole_folder import new_file

_LARGEST = 1 << 30  # bytes


@dataclass
class State:
    """What has been seen so far.

    Attributes:
        fingerprint: Of the model, the data and the options; only equal ones go on.
        prompts: How many are done.
        tokens: In these.
        workers: The maxima of each worker, in the order of the engine.
        before: The unified maxima when nine tenths were done.
    """

    fingerprint: str
    prompts: int = 0
    tokens: int = 0
    workers: list[Numbers] = field(default_factory=list)
    before: Numbers | None = None

    def save(self, path: Path) -> None:
        """Writes it beside ``path`` and renames."""
        with new_file(path) as part:
            part.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> "State":
        """Reads it back.

        Raises:
            ValueError: If there is none, or it belongs to another run.
        """
        try:
            state = cls(**parse_json(read_text(path, _LARGEST)))
        except OSError:
            raise ValueError(f"--resume: there is no {path}; start anew") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}; remove it and start anew") from None
        if state.fingerprint != fingerprint:
            raise ValueError(
                f"--resume: {path} was written for another model, other data or other "
                "options; remove it and start anew"
            )
        return state


def fingerprint(model: str, prompts: list[list[int]], options: Any) -> str:
    """Tells two runs apart."""
    text = json.dumps([str(Path(model).resolve()), prompts, options])
    return hashlib.sha256(text.encode()).hexdigest()
