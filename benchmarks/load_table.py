# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the table of ``docs/operations.md`` from ``benchmarks/results/load.json``.

python -m benchmarks.load --out benchmarks/results/load.json
python -m benchmarks.load_table
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, write_between

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
_COUNTS = ("finished, ", "cancelled", "disconnected", "refused, ", "preemptions")
_POINTS = ("p50", "p90", "p99")
_PLACES = ("a tenth", "half", "the end")


def load_table(result: dict[str, Any]) -> str:
    """Counts, percentiles and memory of one run."""
    lines = ["| Clients | |", "|---|---|"]
    for name, value in result.items():
        if name.startswith(_COUNTS):
            lines.append(f"| {name} | {value:,g} |")
    lines.append(f"| problems | {len(result['problems'])} |")
    lines += ["", "| Seconds | " + " | ".join(_POINTS) + " |", "|---|---|---|---|"]
    for name in ("to the first token", "to the last token"):
        values = [f"{result[f'{name}, s, {p}']:.2f}" for p in _POINTS]
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    minutes = [f"{result['seconds'] * part / 60:g}" for part in (0.1, 0.5, 1)]
    lines += ["", "| Resident MB after minute | " + " | ".join(minutes) + " |"]
    lines.append("|---|---|---|---|")
    server, engine, family = (
        [result[f"RSS{whose} at {at}, MB"] for at in _PLACES]
        for whose in (" of the API server", " of the engine", "")
    )
    worker = [a - b - c for a, b, c in zip(family, server, engine)]
    sizes = {"API server": server, "engine core": engine, "its worker": worker}
    for name, values in sizes.items():
        lines.append(f"| {name} | " + " | ".join(f"{v:,g}" for v in values) + " |")
    where = f"{result['machine']}, Python {result['python']}, torch {result['torch']}"
    return "\n".join(lines) + (
        f"\n\n{result['clients']} clients, {result['seconds']:g} seconds; {where}."
    )


def main() -> None:
    """Puts it between its marks."""
    result = json.loads((RESULTS / "load.json").read_text())
    write_between(PAGE, "load", load_table(result))


if __name__ == "__main__":
    main()
