# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The CPU kernels over an FP8 cache against upstream's over a bf16 cache.

Both run in turn in one process; a ratio is the median of the ratios of each turn, and
above 1 where ours is faster.

Example:
    python -m benchmarks.kernels --threads 1 2 --out kernels.json

With --out, rows that a file has already are replaced and others stay;
``benchmarks.kernel_tables`` makes the tables of docs/kernels.md of it, and a plot.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_cases import (
    absorb_case,
    decode_case,
    heads_decode_case,
    heads_write_case,
    latent_write_case,
    prefill_case,
)


def ratio(
    upstream: Callable[[], object], ours: Callable[[], object], budget: float, cpu: bool
) -> dict[str, float]:
    """Times both in turn.

    Args:
        upstream: One call of what is compared with.
        ours: One call.
        budget: Seconds that all turns may take; there are 5 at least, 3 where one
            takes longer than that.
        cpu: Whether to count CPU time of this thread, which other processes disturb
            less; for one thread only.
    """
    clock = time.thread_time if cpu else time.perf_counter

    def seconds(run: Callable[[], object]) -> float:
        start = clock()
        run()
        return clock() - start

    for run in (upstream, ours):
        run()
    pairs = []
    end = time.perf_counter() + budget
    least = 5
    while len(pairs) < least or (time.perf_counter() < end and len(pairs) < 200):
        pairs.append((seconds(upstream), seconds(ours)))
        least = 3 if sum(pairs[0]) > budget else 5
    theirs, mine = zip(*pairs)
    return {
        "upstream_us": round(statistics.median(theirs) * 1e6, 1),
        "ours_us": round(statistics.median(mine) * 1e6, 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
        "turns": len(pairs),
    }


def cases(quick: bool) -> list[tuple[dict[str, Any], Callable]]:
    """Every row of the tables: what it is, and how to make it."""
    contexts = (512, 2048) if quick else (512, 2048, 8192, 32768)
    batches = (1, 8) if quick else (1, 8, 32)
    rows: list[tuple[dict[str, Any], Callable]] = []
    for heads in (16, 128):
        for batch in batches:
            for context in contexts:
                of = {"batch": batch, "context": context, "heads": heads}
                rows.append(
                    ({"table": "MLA decode"} | of, lambda of=of: decode_case(**of))
                )
    for batch in batches:
        for context in contexts:
            of = {"batch": batch, "context": context}
            rows.append(
                ({"table": "GQA decode"} | of, lambda of=of: heads_decode_case(**of))
            )
    for tokens in (1, 8, 128, 2048):
        for table, make in (
            ("MLA write", latent_write_case),
            ("GQA write", heads_write_case),
        ):
            row = {"table": table, "tokens": tokens}
            rows.append((row, lambda make=make, tokens=tokens: make(tokens)))
    for tokens in (1, 8, 128):
        row = {"table": "MLA kv_b_proj", "tokens": tokens}
        rows.append((row, lambda tokens=tokens: absorb_case(tokens)))
    for tokens in (1024,) if quick else (1024, 4096, 16384):
        row = {"table": "MLA prefill", "tokens": tokens}
        rows.append((row, lambda tokens=tokens: prefill_case(tokens)))
    return rows


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    from vllm.fp8_inc.attention.kernels.vectors import cpu_features

    known = {"avx512bf16": "AVX512_BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    names = [text for name, text in known.items() if name in cpu_features()]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    model = fields.get("model name", platform.machine())
    kind = " ".join(fields.get(key, "") for key in ("cpu family", "model"))
    return {
        "cpu": f"{model} (family and model {kind})",
        "features": names[0] if names else "no AVX2",
        "cores": os.cpu_count(),
    }


def save(results: list[dict[str, Any]], path: Path) -> None:
    """Writes rows beside those that the file has."""
    from vllm.fp8_inc.whole_folder import new_file

    def key(row: dict[str, Any]) -> tuple:
        measured = ("upstream_us", "ours_us", "ratio", "turns")
        return tuple((name, row[name]) for name in row if name not in measured)

    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {key(row): row for row in before} | {key(row): row for row in results}
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    text = f'{{"machine": {json.dumps(machine())}, "rows": [\n{lines}\n]}}\n'
    with new_file(path) as part:
        part.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=2.0, help="a row, about")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--table", help="only rows of tables that begin so")
    parser.add_argument("--batch", type=int, nargs="+", help="only these")
    parser.add_argument("--context", type=int, nargs="+", help="only these")
    parser.add_argument("--cpu-time", action="store_true", help="with --threads 1 only")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    if args.cpu_time and args.threads != [1]:
        parser.error("--cpu-time counts one thread: give --threads 1")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    results = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for row, make in cases(args.quick):
            if args.table and not row["table"].startswith(args.table):
                continue
            if args.batch and row.get("batch") not in args.batch:
                continue
            if args.context and row.get("context") not in args.context:
                continue
            times = ratio(*make(), args.seconds, args.cpu_time)
            results.append(row | {"threads": threads} | times)
            print(json.dumps(results[-1]), flush=True)
    if args.out:
        save(results, args.out)


if __name__ == "__main__":
    main()
