# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the end-to-end table of docs/kernels.md from ``benchmarks.serving``'s JSON.

Example:
    python -m benchmarks.serving_page
    python -m benchmarks.serving_page --plot docs/figures/serving.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, markdown, write_between

PAGE = Path(__file__).parents[1] / "docs/kernels.md"


def cells(rows: dict[str, Any]) -> dict[str, Any]:
    """The rows of output tokens a second, by "context x concurrency"."""
    return {name: row for name, row in rows.items() if " x " in name}


def render(results: dict[str, Any]) -> str:
    """Markdown of all rows that were measured."""
    settings, rows = results["settings"], results["rows"]
    parts = [
        f"{settings['cpu']}, {settings['layers']} layers, answers of "
        f"{settings['output_tokens']} tokens, OMP_NUM_THREADS {settings['threads']}."
    ]
    lines = []
    for name, row in cells(rows).items():
        context, concurrency = name.split(" x ")
        stock = row.get("stock", {})
        figures = [
            *(row[arm]["output_throughput"] for arm in ("fp8_inc", "bf16")),
            stock.get("output_throughput", ""),
            row["bf16"]["fp8_inc_ratio"],
            stock.get("fp8_inc_ratio", ""),
            row["turns"],
        ]
        lines.append([context, concurrency, *map(str, figures)])
    if lines:
        head = "context, concurrency, fp8_inc, bf16, stock bf16, fp8_inc / bf16"
        head += ", fp8_inc / stock, turns"
        parts.append("Output tokens a second, medians, and medians of ratios:")
        parts.append(markdown(head.split(", "), lines))
    for name, row in rows.items():
        if name not in cells(rows):
            figures = ", ".join(f"{k} {v}" for k, v in row.items())
            parts.append(f"{name[0].upper() + name[1:]}: {figures}.")
    return "\n\n".join(parts)


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the ratios to both bf16 arms; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = cells(results["rows"])
    figure, axes = plt.subplots(figsize=(7, 3))
    for shift, arm in ((-0.2, "bf16"), (0.2, "stock")):
        found = [n for n, row in enumerate(rows.values()) if arm in row]
        ratios = [row[arm]["fp8_inc_ratio"] for row in rows.values() if arm in row]
        axes.bar([n + shift for n in found], ratios, 0.4, label=f"over {arm}")
    axes.set_xticks(range(len(rows)), rows)
    axes.set(xlabel="context x concurrency", ylabel="output tokens/s, fp8_inc over")
    axes.axhline(1, color="grey", linewidth=0.5)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def write(results: dict[str, Any]) -> None:
    """Replaces the figures of the page."""
    write_between(PAGE, "serving", render(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "serving.json")
    parser.add_argument("--plot", type=Path, help="SVG")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    write(results)
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
