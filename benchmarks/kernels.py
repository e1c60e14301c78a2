# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The CPU kernels over an FP8 cache against upstream's over a bf16 cache.

Both run in turn in one process; a ratio is the median of the ratios of each turn, and
above 1 where ours is faster.

Example:
    python -m benchmarks.kernels --threads 1 2 --out kernels.json --plot kernels.png

With --out, rows that a file has already are replaced and others stay;
``benchmarks.kernel_tables`` makes the tables of docs/kernels.md of it.
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

LATENT, ROPE, BLOCK = 512, 64, 16
LOGIT_SCALE = 192**-0.5
DEQUANT_SCALE = 0.02


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


def _as_bf16(codes: torch.Tensor) -> torch.Tensor:
    """What codes stand for, in parts: float32 of a whole cache would fill memory."""
    from vllm.fp8_inc.formats import GAUDI3

    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    for part, target in zip(codes.split(1024), out.split(1024)):
        target.copy_(GAUDI3.decode(part) * DEQUANT_SCALE)
    return out


def decode_case(batch: int, context: int, heads: int) -> tuple[Callable, Callable]:
    """Upstream's and our decode of MLA on the same values."""
    from vllm import _custom_ops as ops
    from vllm.fp8_inc.attention.kernels.mla import decode_latents
    from vllm.fp8_inc.formats import GAUDI3

    size = LATENT + ROPE
    per_sequence = -(-context // BLOCK)
    order = torch.randperm(batch * per_sequence)
    table = order.view(batch, per_sequence).int()
    lengths = torch.full((batch,), context, dtype=torch.int32)
    codes = torch.randint(0x70, (batch * per_sequence, BLOCK, size), dtype=torch.uint8)
    bf16 = _as_bf16(codes)
    query = torch.randn(batch, heads, size).bfloat16() * 0.1
    out = torch.empty(batch, heads, LATENT, dtype=torch.bfloat16)
    parts = query.split([LATENT, ROPE], dim=-1)

    def upstream() -> None:
        ops.mla_decode_kvcache_cpu(out, query, bf16, LOGIT_SCALE, table, lengths)

    def ours() -> None:
        decode_latents(
            *parts, codes, table, lengths, LOGIT_SCALE, DEQUANT_SCALE, GAUDI3
        )

    return upstream, ours


def heads_decode_case(batch: int, context: int) -> tuple[Callable, Callable]:
    """Upstream's bf16 decode and ours; 32 heads, 8 kv heads of 128, blocks of 32."""
    from vllm import _custom_ops as ops
    from vllm.fp8_inc.attention.kernels.gqa import decode_heads
    from vllm.fp8_inc.formats import GAUDI3

    heads, kv_heads, size, block = 32, 8, 128, 32
    per_sequence = -(-context // block)
    blocks = batch * per_sequence
    table = torch.randperm(blocks).view(batch, per_sequence).int()
    lengths = torch.full((batch,), context, dtype=torch.int32)
    codes = torch.randint(0x70, (blocks, kv_heads, block, 2 * size), dtype=torch.uint8)
    values = _as_bf16(codes)
    planes = values.view(blocks, kv_heads, 2 * block, size).chunk(2, dim=2)
    query = torch.randn(batch, heads, size).bfloat16()
    out = torch.empty_like(query)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    scale = torch.tensor(DEQUANT_SCALE)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        seq_lens=lengths,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
    )

    def upstream() -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=planes[0],
            value_cache=planes[1],
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )

    def ours() -> None:
        decode_heads(query, codes, table, lengths, size**-0.5, scale, scale, GAUDI3)

    return upstream, ours


def latent_write_case(tokens: int) -> tuple[Callable, Callable]:
    """Upstream's write of bf16 latents by torch indexing, and our cast and write."""
    from vllm.fp8_inc.attention.kernels.writers import LatentWriter
    from vllm.fp8_inc.formats import GAUDI3

    latent = torch.randn(tokens, LATENT).bfloat16()
    rope = torch.randn(tokens, ROPE).bfloat16()
    slots = torch.randperm(40_000)[:tokens]
    bf16 = torch.zeros(40_000, LATENT + ROPE, dtype=torch.bfloat16)
    codes = torch.zeros(40_000 // BLOCK, BLOCK, LATENT + ROPE, dtype=torch.uint8)

    def upstream() -> None:
        valid = slots >= 0
        if valid.all().item():
            bf16[slots, :LATENT] = latent
            bf16[slots, LATENT:] = rope

    writer = LatentWriter(codes, LATENT, 3.0, GAUDI3)

    def ours(cache: torch.Tensor = codes) -> None:
        writer.write(latent, rope, slots)

    return upstream, ours


def heads_write_case(tokens: int) -> tuple[Callable, Callable]:
    """Upstream's write of bf16 K and V, and our cast and write; 8 heads of 128."""
    from vllm import _custom_ops as ops
    from vllm.fp8_inc.attention.kernels.writers import HeadsWriter
    from vllm.fp8_inc.formats import GAUDI3

    heads, size, block, blocks = 8, 128, 32, 80
    key, value = torch.randn(2, tokens, heads, size).bfloat16().unbind()
    slots = torch.arange(tokens) + 7 * block
    bf16 = torch.zeros(blocks, heads, 2 * block, size, dtype=torch.bfloat16)
    planes = bf16.chunk(2, dim=2)
    codes = torch.zeros(blocks, heads, block, 2 * size, dtype=torch.uint8)
    writer = HeadsWriter(codes, torch.ones(()), torch.ones(()), GAUDI3)

    def upstream() -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *planes, slots, "vec")

    def ours(cache: torch.Tensor = codes) -> None:
        writer.write(key, value, slots)

    return upstream, ours


def prefill_case(tokens: int, heads: int = 16) -> tuple[Callable, Callable]:
    """Upstream's bf16 attention on expanded K and padded V, and ours in float32."""
    import torch.nn.functional as F

    from vllm.fp8_inc.attention.dense import Joined

    query, key = torch.randn(2, tokens, heads, 192).bfloat16().unbind()
    value = torch.randn(tokens, heads, 128).bfloat16()

    def upstream() -> None:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, F.pad(value, (0, 64))))
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=LOGIT_SCALE)

    def ours() -> None:
        attention = Joined(query, LOGIT_SCALE, 128)
        attention.attend(key, value, causal=True)

    return upstream, ours


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


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the ratios of decode over the context; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in results:
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
    parser.add_argument("--plot", type=Path, help="PNG")
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
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
