# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Decode of MLA over a paged latent cache, as one kernel.

The cache is read once for each group of heads: a tile of latents becomes float32,
serves as keys and as values, and is forgotten. Long sequences are cut into pieces, so
that a batch of one keeps every core busy; whoever finishes the last piece of a
sequence joins them.
"""

import numpy as np
import torch
from numba import carray, njit

from vllm.fp8_inc.attention.kernels import rows, writers
from vllm.fp8_inc.attention.kernels.pieces import (
    as_read,
    clear,
    join,
    memory_of,
    padded,
    partial,
    piece,
    piece_of,
    write_result,
)
from vllm.fp8_inc.attention.kernels.runtime import (
    KINDS,
    Kernel,
    record_type,
    threads_for,
)
from vllm.fp8_inc.attention.kernels.tiles import (
    ROWS,
    TOKENS,
    logits_of,
    outer,
    softmax_of,
)
from vllm.fp8_inc.attention.kernels.vectors import (
    LANES,
    address_of,
    fetch_add,
    pointer,
)
from vllm.fp8_inc.formats import Fp8Format

# Tokens in a tile, and heads that share it: together they fill half of a second-level
# cache of 512 KiB.
TILE = 48
GROUP = 32
# The shortest piece of a sequence, in tokens.
_SHORTEST_PIECE = 4 * TILE

# Addresses; sizes in elements; strides (and ``own_size``) in bytes. ``own`` is memory
# of a thread, ``partial`` of the pieces.
_RECORD = record_type(
    "latent_query latent_query_sequence latent_query_head "
    "rope_query rope_query_sequence rope_query_head query_kind "
    "cache cache_block cache_row cache_kind max_code block_size "
    "table table_sequence lengths sequences heads latent rope "
    "groups group piece pieces finished partial own own_size out out_kind",
    "logit_scale out_scale",
)


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
    group = min(GROUP, -(-heads // ROWS) * ROWS)
    groups = -(-heads // group)
    length = piece(tokens * groups, threads, _SHORTEST_PIECE)
    most_pieces = tokens // length + sequences
    numbers = partial(group, latent) * groups
    pieces, finished = memory_of(numbers, sequences * groups, most_pieces, threads)
    own = torch.empty(threads, _own(group, latent, rope), dtype=torch.float32)
    out = torch.empty_like(latent_query, memory_format=torch.contiguous_format)
    query_bytes = latent_query.element_size()
    _kernel(
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
        latent=latent,
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
    _kernel.compile()
    writers.latents.compile()


def _own(group: int, latent: int, rope: int) -> int:
    """float32 numbers of a thread: queries, a result, a tile, its logits, decays."""
    lines = group * (latent + rope) + partial(group, latent) + TILE * (latent + rope)
    return lines + (TILE + 1) * padded(group, LANES)


@njit
def _read_query(a, sequence, head, count, target):
    """Reads ``count`` heads, scaled; rows that fill up to ROWS become zero."""
    size = a.latent + a.rope
    latent = a.latent_query + sequence * a.latent_query_sequence
    rope = a.rope_query + sequence * a.rope_query_sequence
    for i in range(count):
        row = target + 4 * i * size
        h = head + i
        rows.read_row(a.query_kind, 0, latent + h * a.latent_query_head, row, a.latent)
        rope_row = row + 4 * a.latent
        rows.read_row(a.query_kind, 0, rope + h * a.rope_query_head, rope_row, a.rope)
        rows.scale_row(row, row, size, a.logit_scale)
    for i in range(count, padded(count, ROWS)):
        rows.zero_row(target + 4 * i * size, size)


@njit
def _row(a, table, token):
    """The address of a token in the cache."""
    block = np.int64(table[token // a.block_size])
    return a.cache + block * a.cache_block + token % a.block_size * a.cache_row


@njit
def _read_tile(a, table, start, tokens, stop, tile):
    """Reads latents; asks for those of the next tile; adds zeros up to TOKENS."""
    size = a.latent + a.rope
    for i in range(tokens):
        if start + TILE + i < stop:
            rows.prefetch_row(_row(a, table, start + TILE + i), a.cache_row)
        row = _row(a, table, start + i)
        rows.read_row(a.cache_kind, a.max_code, row, tile + 4 * i * size, size)
    for i in range(tokens, padded(tokens, TOKENS)):
        rows.zero_row(tile + 4 * i * size, size)


@njit
def _attend(a, query, count, table, start, stop, memory, highest, total, sums):
    """Attends with ``count`` rows to the tokens from ``start`` to ``stop``."""
    row = 4 * (a.latent + a.rope)
    width = 4 * padded(count, LANES)
    tile = memory
    logits = tile + TILE * row
    decay = logits + TILE * width
    for t in range(start, stop, TILE):
        tokens = min(TILE, stop - t)
        _read_tile(a, table, t, tokens, stop, tile)
        computed = padded(tokens, TOKENS)
        logits_of(query, row, count, tile, row, computed, row // 4, logits, width)
        softmax_of(logits, width, count, tokens, highest, total, decay)
        outer(
            sums, 4 * a.latent, count, logits, width, 4, decay, tile, row, tokens,
            a.latent,
        )  # fmt: skip


@njit
def _item(a, item, memory):
    """One piece of one sequence, for one group of heads."""
    number, group = item // a.groups, item % a.groups
    sequence, first, pieces, length = piece_of(a, number)
    if sequence < 0:
        return
    head = group * a.group
    heads = min(a.group, a.heads - head)
    count = padded(heads, ROWS)
    width = padded(count, LANES)
    query = memory
    memory += 4 * count * (a.latent + a.rope)
    one = partial(a.group, a.latent)
    joined = a.partial + 4 * one * (first * a.groups + group * pieces)
    if pieces > 1:
        highest = joined + 4 * one * (number - first)
    else:
        highest = memory
        memory += 4 * one
    total = highest + 4 * width
    sums = total + 4 * width
    clear(highest, total, sums, width, count * a.latent)
    _read_query(a, sequence, head, heads, query)
    table = carray(
        pointer(a.table + sequence * a.table_sequence), a.table_sequence // 4, np.int32
    )
    start = (number - first) * a.piece
    stop = min(length, start + a.piece)
    _attend(a, query, count, table, start, stop, memory, highest, total, sums)
    if pieces > 1:
        done = fetch_add(a.finished + 8 * (sequence * a.groups + group), 1)
        if done < pieces - 1:
            return
        join(joined, heads, width, one, a.latent, pieces)
        total = joined + 4 * width
        sums = total + 4 * width
    row = sequence * a.heads + head
    write_result(a, row, heads, a.latent, a.out_scale, total, sums)


def _decode(record):
    a = carray(record, 1)[0]
    counters = address_of(record)
    memory = a.own + fetch_add(counters + 8, 1) * a.own_size
    items = a.pieces * a.groups
    item = fetch_add(counters, 1)
    while item < items:
        _item(a, item, memory)
        item = fetch_add(counters, 1)


_kernel = Kernel(_decode, _RECORD)
