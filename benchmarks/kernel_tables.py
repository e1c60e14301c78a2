# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the tables of docs/kernels.md from the JSON of ``benchmarks.kernels``.

Example:
    python -m benchmarks.kernels --threads 1 --cpu-time --out FILE.json, FILE as RESULTS
    python -m benchmarks.kernel_tables
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/kernels.json"
PAGE = ROOT / "docs/kernels.md"
BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"

Rows = list[dict[str, Any]]


def _table(head: list[str], lines: list[list[str]]) -> str:
    parts = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(part) + " |" for part in parts)


def _pivot(rows: Rows, line: str, column: str, what: str) -> str:
    """A table of ratios: a line for each value of one key, a column for the other's."""
    ratios = {(row[line], row[column]): row["ratio"] for row in rows}
    columns = sorted({row[column] for row in rows})
    lines = [
        [str(value)] + [str(ratios.get((value, name), "")) for name in columns]
        for value in sorted({row[line] for row in rows})
    ]
    return _table([line] + [f"{what}{name}" for name in columns], lines)


def render(results: dict[str, Any]) -> str:
    """Markdown of all rows."""
    rows, machine = results["rows"], results["machine"]
    parts = [f"{machine['cpu']}, {machine['features']}, {machine['cores']} cores."]
    for threads in sorted({row["threads"] for row in rows}):
        here = [row for row in rows if row["threads"] == threads]
        plural = "thread" if threads == 1 else "threads"
        for heads in (16, 128):
            decode = [row for row in here if row.get("heads") == heads]
            if decode:
                parts.append(f"MLA decode, {heads} heads, {threads} {plural}:")
                parts.append(_pivot(decode, "context", "batch", "batch "))
        decode = [row for row in here if row["table"] == "GQA decode"]
        if decode:
            parts.append(
                f"GQA decode, 32 heads, 8 kv heads of 128, {threads} {plural}:"
            )
            parts.append(_pivot(decode, "context", "batch", "batch "))
        tokens = [row for row in here if "tokens" in row]
        if tokens:
            parts.append(f"Writers and prefill, {threads} {plural}:")
            parts.append(_pivot(tokens, "tokens", "table", ""))
    return "\n\n".join(parts)


def page(text: str, results: dict[str, Any]) -> str:
    """The page with its tables replaced."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{render(results)}\n{END}{after}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
