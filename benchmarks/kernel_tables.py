# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the tables of docs/kernels.md from the JSON of ``benchmarks.kernels``.

Example:
    python -m benchmarks.kernel_tables
    python -m benchmarks.kernel_tables --plot kernels.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, markdown, write_between

PAGE = Path(__file__).parents[1] / "docs/kernels.md"

Rows = list[dict[str, Any]]


def _pivot(rows: Rows, line: str, column: str, what: str) -> str:
    """A table of ratios: a line for each value of one key, a column for the other's."""
    ratios = {(row[line], row[column]): row["ratio"] for row in rows}
    columns = sorted({row[column] for row in rows})
    lines = [
        [str(value)] + [str(ratios.get((value, name), "")) for name in columns]
        for value in sorted({row[line] for row in rows})
    ]
    return markdown([line] + [f"{what}{name}" for name in columns], lines)


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
            parts.append(f"Other kernels, {threads} {plural}:")
            parts.append(_pivot(tokens, "tokens", "table", ""))
    return "\n\n".join(parts)


def plot(rows: Rows, path: Path) -> None:
    """Draws the ratios of decode over the context; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["table"] == "MLA decode":
            name = (
                f"{row['heads']} heads, batch {row['batch']}, {row['threads']} threads"
            )
            lines.setdefault(name, []).append((row["context"], row["ratio"]))
    for name, points in lines.items():
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set(xscale="log", xlabel="context, tokens", ylabel="upstream's time / ours")
    axes.axhline(1, color="grey", linewidth=0.5)
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=150)


def write(results: dict[str, Any]) -> None:
    """Replaces the tables of the page."""
    write_between(PAGE, "kernels", render(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "kernels.json")
    parser.add_argument("--plot", type=Path, help="PNG or SVG")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    write(results)
    if args.plot:
        plot(results["rows"], args.plot)


if __name__ == "__main__":
    main()
