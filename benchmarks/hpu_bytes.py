# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Bytes that a decode on HPU moves for each cached token and layer, counted.

Runs the operators in software on two contexts and two numbers of heads, each operator
for itself, nothing fused: the slope over context, at zero heads, is what the cache
costs; the rest grows with the heads. Then the bounds on tokens/s that follow
(benchmarks/hpu_roofline.py), which are computed and not measured.
"""

import argparse
import json
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import hpu_roofline
from benchmarks.hpu_worker import WorkerDecode
from vllm.fp8_inc import hpu_ops
from vllm.fp8_inc.attention.hpu_decode import PagedDecode
from vllm.fp8_inc.attention.mha_hpu import MHAPieces
from vllm.fp8_inc.attention.mla_hpu import MLAPieces
from vllm.fp8_inc.formats import GAUDI3
from vllm.fp8_inc.scales import AttentionScales, StaticScale

BLOCK = 128
_CONTEXTS = (4, 16)  # blocks
_HEADS = (8, 16)


class Shape(NamedTuple):
    """The heads of a layer.

    Attributes:
        kv_heads: 1 for MLA.
        dim: Of K; the latent and the rope of MLA.
        value_dim: Of V.
        mla: Whether V is the start of K.
    """

    kv_heads: int
    dim: int
    value_dim: int
    mla: bool


class Bytes(NamedTuple):
    """Bytes a cached token and layer: at zero heads, and more for each head."""

    cache: float
    each_head: float


MLA = Shape(1, 576, 512, True)
GQA = Shape(8, 128, 128, False)


def worker_fp8(shape: Shape, contiguous: bool) -> Callable:
    """The HPU worker as it is, with an fp8_inc cache."""
    return WorkerDecode.fp8(1.0, 1.0, 1.0, contiguous, shape.mla)


def worker_bf16(shape: Shape, contiguous: bool) -> Callable:
    """The HPU worker as it is, with a bf16 cache."""
    return WorkerDecode.bf16(contiguous, shape.mla)


def ours(shape: Shape, contiguous: bool, matmul: str = "fp8") -> Callable:
    """This fork."""
    kind = MLAPieces if shape.mla else MHAPieces
    pieces = kind(GAUDI3, contiguous, matmul)
    unit = StaticScale.from_dequant(1.0, torch.bfloat16)
    pieces.load_scales(AttentionScales(unit, unit, unit, "benchmark"))
    return pieces.decode


def ours_bf16(shape: Shape, contiguous: bool) -> Callable:
    """This fork with hpu_matmul "bf16"."""
    return ours(shape, contiguous, "bf16")


def moved(
    decode: Callable,
    shape: Shape,
    dtype: torch.dtype,
    heads: int,
    blocks: int,
    block_size: int = BLOCK,
) -> int:
    """Bytes of one decode step of one sequence."""
    caches = [
        torch.zeros(blocks * block_size, shape.kv_heads, dim, dtype=dtype)
        for dim in (shape.dim, shape.value_dim)
    ]
    arguments = {
        "query": torch.ones(1, heads, shape.dim, dtype=torch.bfloat16),
        "key_cache": caches[0],
        "value_cache": None if shape.mla else caches[1],
        "block_list": torch.arange(blocks),
        "block_mapping": torch.ones(blocks, 1, dtype=torch.bfloat16),
        "block_bias": torch.zeros(blocks, block_size, dtype=torch.bfloat16),
        "block_groups": torch.zeros(blocks, dtype=torch.long),
        "block_size": block_size,
        "scale": 0.1,
        "kv_lora_rank": shape.value_dim if shape.mla else None,
    }
    with hpu_ops.ByteCounter() as counter:
        decode(**arguments)
    return counter.total


def count(decode: Callable, shape: Shape, dtype: torch.dtype) -> Bytes:
    """Splits the bytes of a token: those of its own, and those of each head.

    The first from blocks of two sizes, so that what is read once a block stays out;
    the second over contexts, where it counts.
    """
    few, many = _HEADS
    less, more = _CONTEXTS

    def slope(heads: int) -> float:
        sizes = [moved(decode, shape, dtype, heads, blocks) for blocks in _CONTEXTS]
        return (sizes[1] - sizes[0]) / ((more - less) * BLOCK)

    def own(heads: int) -> float:
        sizes = [moved(decode, shape, dtype, heads, less, n * BLOCK) for n in (1, 2)]
        return (sizes[1] - sizes[0]) / (less * BLOCK)

    each_own = (own(many) - own(few)) / (many - few)
    # The mask's element, which no layer caches; we turn it into a bool of two uses.
    mask = 5 if isinstance(decode, PagedDecode) else 2
    return Bytes(
        own(few) - each_own * few - mask, (slope(many) - slope(few)) / (many - few)
    )


def rows() -> dict[str, tuple[Callable, torch.dtype]]:
    """What is compared, and the dtype of its cache."""
    fp8 = torch.float8_e4m3fn
    return {
        "worker, bf16 cache": (worker_bf16, torch.bfloat16),
        "worker, fp8_inc": (worker_fp8, fp8),
        "this fork": (ours, fp8),
        'this fork, hpu_matmul "bf16"': (ours_bf16, fp8),
    }


def table() -> list[dict[str, object]]:
    """Counts everything."""
    result = []
    for layer, shape in {"MLA 512 + 64": MLA, "GQA 8 x 128": GQA}.items():
        for name, (build, dtype) in rows().items():
            for contiguous in (False, True):
                size = count(build(shape, contiguous), shape, dtype)
                result.append(
                    {
                        "layer": layer,
                        "path": name,
                        "blocks": "contiguous" if contiguous else "gathered",
                        "cache": round(size.cache, 1),
                        "each query head": round(size.each_head, 1),
                    }
                )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the counts, for machines")
    args = parser.parse_args()
    hpu_ops.register()
    with hpu_ops.emulate("gaudi3"):
        counted = table()
    if args.json:
        print(json.dumps(counted, indent=1))
        return
    print("Bytes for each cached token and layer, counted, nothing fused:")
    for row in counted:
        print("| " + " | ".join(map(str, row.values())) + " |")
    sizes = {
        f"{row['path']}, {row['blocks']}": row["cache"]
        for row in counted
        if row["layer"].startswith("MLA")
    }
    hpu_roofline.print_tables(sizes)


if __name__ == "__main__":
    main()
