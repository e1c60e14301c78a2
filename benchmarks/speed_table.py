# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes README's table of speed from what the other benchmarks measured.

Example:
     python -m benchmarks.speed_table
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, markdown, write_between

PAGE = Path(__file__).parents[1] / "README.md"


def _decode(rows: list[dict[str, Any]], heads: int) -> str:
    """Ratios of one thread over all contexts and batches."""
    ratios = [
        row["ratio"]
        for row in rows
        if row["table"] == "MLA decode" and (row["heads"], row["threads"]) == (heads, 1)
    ]
    middle = statistics.median(ratios)
    return f"{middle:.2g} times ({min(ratios):.2g} to {max(ratios):.2g})"


def _first_token(row: dict[str, Any], context: int) -> str:
    new, known = (row[f"{context}_{name}_ms"] / 1000 for name in ("new", "known"))
    return f"{known:.2g} s instead of {new:.2g} s"


def render(kernels: dict[str, Any], serving: dict[str, Any]) -> str:
    """Markdown: what the fork's FP8 cache costs and saves on the machine."""
    machine = kernels["machine"]
    tokens, first = (serving["rows"][n] for n in ("KV tokens a GiB", "first token"))
    layers = f", {serving['settings']['layers']} layers"
    more = tokens["fp8_inc"] / tokens["bf16"]
    lines = [["tokens that a GiB of cache holds, over bf16", f"{more:.2f} times"]]
    for heads in (16, 128):
        what = f"MLA decode kernel, {heads} heads, over upstream's bf16"
        lines.append([what, _decode(kernels["rows"], heads)])
    for context in (512, 4096):
        what = f"first token of {context} tokens, all but 16 cached{layers}"
        lines.append([what, _first_token(first, context)])
    where = f"{machine['cpu']}, {machine['features']}, one thread"
    return markdown(["what", where], lines)


def main() -> None:
    kernels, serving = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("kernels", "serving")
    )
    write_between(PAGE, "speed", render(kernels, serving))


if __name__ == "__main__":
    main()
