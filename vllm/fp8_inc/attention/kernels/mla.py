# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Decode of MLA over a paged latent cache, as one kernel.

The cache is read once for each group of heads: a tile of latents is decoded, to
float32 or, where the CPU has dot products of it, to bfloat16, serves as keys and as
values, and is forgotten. Long sequences are cut into pieces, so that a batch of one
keeps every core busy; whoever finishes the last piece of a sequence joins them.
"""

from types import ModuleType

import torch

from vllm.fp8_inc.attention.kernels import (
    absorb,
    mla_bf16,
    mla_float,
    rows,
    writers,
)
from vllm.fp8_inc.attention.kernels.pieces import (
    as_read,
    memory_of,
    padded,
    partial,
    piece,
)
from vllm.fp8_inc.attention.kernels.runtime import KINDS, threads_for
from vllm.fp8_inc.attention.kernels.tiles_bf16 import HAS_DOT
from vllm.fp8_inc.formats import Fp8Format

# The shortest piece of a sequence, in tokens.
_SHORTEST_PIECE = 4 * mla_float.TILE


def decode_latents(
    latent_query: torch.Tensor,
    rope_query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    logit_scale: float,
    dequant_scale: float,
    fmt: Fp8Format,
) -> torch.Tensor:
    """Attends with one token of each sequence to its latents.

    Args:
        latent_query: [sequences, heads, latent], bfloat16, float16 or float32; its last
            dimension is contiguous and a multiple of 16.
        rope_query: [sequences, heads, rope], as latent_query.
        cache: [blocks, block_size, latent + rope]: uint8 codes, bfloat16, float16 or
            float32. The last dimension is contiguous.
        block_table: [sequences, blocks of the longest], integers.
        lengths: [sequences], integers; tokens in the cache.
        logit_scale: Multiplies the logits.
        dequant_scale: x = q * dequant_scale; for uint8 only.
        fmt: The flavour of FP8 codes.

    Returns:
        [sequences, heads, latent] in the dtype of the query.
    """
    block_table, lengths = as_read(block_table, lengths)
    sequences, heads, latent = latent_query.shape
    rope = rope_query.shape[-1]
    kind, query_kind = KINDS[cache.dtype], KINDS[latent_query.dtype]
    scale = dequant_scale * rows.FP8_UNIT if kind == rows.FP8 else 1.0
    tokens = sum(lengths.tolist())
    threads = threads_for(tokens * heads * (latent + rope))
    tile = _tile_for(query_kind, kind)
    group = min(tile.GROUP, padded(heads, tile.STEP))
    groups = -(-heads // group)
    length = piece(tokens * groups, threads, _SHORTEST_PIECE)
    most_pieces = tokens // length + sequences
    numbers = partial(group, latent) * groups
    pieces, finished = memory_of(numbers, sequences * groups, most_pieces, threads)
    own = torch.empty(threads, tile.own(group, latent, rope), dtype=torch.float32)
    out = torch.empty_like(latent_query, memory_format=torch.contiguous_format)
    query_bytes = latent_query.element_size()
    tile.kernel(
        threads,
        latent_query=latent_query.data_ptr(),
        latent_query_sequence=latent_query.stride(0) * query_bytes,
        latent_query_head=latent_query.stride(1) * query_bytes,
        rope_query=rope_query.data_ptr(),
        rope_query_sequence=rope_query.stride(0) * query_bytes,
        rope_query_head=rope_query.stride(1) * query_bytes,
        query_kind=query_kind,
        cache=cache.data_ptr(),
        cache_block=cache.stride(0) * cache.element_size(),
        cache_row=cache.stride(1) * cache.element_size(),
        cache_kind=kind,
        max_code=fmt.max_code,
        block_size=cache.shape[1],
        table=block_table.data_ptr(),
        table_sequence=block_table.stride(0) * block_table.element_size(),
        lengths=lengths.data_ptr(),
        sequences=sequences,
        heads=heads,
        size=latent,
        rope=rope,
        groups=groups,
        group=group,
        piece=length,
        pieces=most_pieces,
        finished=finished.data_ptr(),
        partial=pieces.data_ptr(),
        own=own.data_ptr(),
        own_size=own.stride(0) * own.element_size(),
        out=out.data_ptr(),
        out_kind=query_kind,
        logit_scale=logit_scale * scale,
        out_scale=scale,
    )
    return out


def load() -> None:
    """Compiles what MLA needs, or loads it from disk, so that no request waits."""
    mla_float.kernel.compile()
    if HAS_DOT:
        mla_bf16.kernel.compile()
    absorb.kernel.compile()
    writers.latents.compile()


def _tile_for(query_kind: int, cache_kind: int) -> ModuleType:
    """The implementation of a tile: of bfloat16 where nothing is rounded by it."""
    exact = query_kind == rows.BF16 and cache_kind in (rows.FP8, rows.BF16)
    return mla_bf16 if HAS_DOT and exact else mla_float
