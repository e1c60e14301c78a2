# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Results on disk: what ran with which versions, one finished arm at a time."""

import json
import logging
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("vllm", "torch", "transformers")


def machine() -> dict[str, Any]:
    """Kind of processor and versions; nothing that names a host or a folder."""
    flags = Path("/proc/cpuinfo")
    known = flags.read_text().split() if flags.exists() else []
    widest = next((f for f in ("avx512f", "avx2") if f in known), "neither AVX")
    return {
        "machine": f"{platform.machine()}, {widest}, one thread",
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def small_and_quiet() -> None:
    """Engines started from here on take 1 GiB for the cache and say errors only."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vllm reads the variable when it is imported, which some benchmarks do at once.
    logging.getLogger("vllm").setLevel(level)


class Record:
    """A JSON file of rows that grows with each finished arm.

    Args:
        path: Where; rows that are there already are kept if the settings agree.
        settings: What all rows have in common.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings | machine()
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            before = json.loads(path.read_text())
            if before["settings"] == self.settings:
                self.rows = before["rows"]

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Writes the file with one more row, whole or not at all."""
        from vllm.fp8_inc.whole_folder import new_file

        self.rows[name] = row
        content = {"settings": self.settings, "rows": self.rows}
        with new_file(self.path) as part:
            part.write_text(json.dumps(content, indent=1) + "\n")


def rounded(values: dict[str, float], digits: int = 6) -> dict[str, float]:
    """Figures as they are shown, so that a file stays small."""
    return {k: float(f"{v:.{digits}g}") for k, v in values.items()}


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between(page: Path, name: str, text: str) -> None:
    """Replaces what stands between <!-- name:begin --> and <!-- name:end -->.

    Raises:
        ValueError: If the page has no such marks.
    """
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no marks {name}:begin and {name}:end")
    from vllm.fp8_inc.whole_folder import new_file

    with new_file(page) as part:
        part.write_text(before + begin + text.rstrip("\n") + "\n" + end + after)
