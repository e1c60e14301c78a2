# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Decode of MHA and GQA over a paged FP8 cache, as one kernel.

All queries of a kv head share what is read for it. K lies as [head_size, block_size]
inside a block, so that its logits are sums of outer products, as its output is.
"""

import numpy as np
import torch
from numba import carray, njit

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.pieces import (
    as_read,
    memory_of,
    padded,
    partial,
    piece,
    table_of,
    worker,
)
from vllm.fp8_inc.attention.kernels.runtime import (
    KINDS,
    Kernel,
    record_type,
    threads_for,
)
from vllm.fp8_inc.attention.kernels.tiles import LOWEST, ROWS, outer, softmax_row
from vllm.fp8_inc.attention.kernels.vectors import LANES, floats, pointer
from vllm.fp8_inc.formats import Fp8Format

# Tokens in a tile, and tokens that are read at once; the latter divides block sizes.
TILE, UNIT = 64, rows.AT_ONCE
_SHORTEST_PIECE = 4 * TILE

# Addresses; sizes in elements; strides (and ``own_size``) in bytes.
_RECORD = record_type(
    "query query_sequence query_head query_kind "
    "cache cache_block cache_head max_code block_size "
    "table table_sequence lengths sequences heads groups group size window "
    "key_scales key_step value_scales value_step "
    "piece pieces finished partial own own_size out out_kind",
    "logit_scale",
)


def decode_heads(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    logit_scale: float,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    fmt: Fp8Format,
    window: int | None = None,
) -> torch.Tensor:
    """Attends with one token of each sequence to its keys and values.

    Args:
        query: [sequences, heads, head_size], bfloat16, float16 or float32; its last
            dimension is contiguous and a multiple of 16.
        cache: [blocks, kv_heads, block_size, 2 * head_size] uint8: in each head of a
            block K as [head_size, block_size], then V as [block_size, head_size];
            block_size is a multiple of 16.
        block_table: [sequences, blocks of the longest], integers.
        lengths: [sequences], integers; tokens in the cache.
        logit_scale: Multiplies the logits.
        key_scales: [] or [kv_heads] float32 dequant scales, x = q * dequant_scale.
        value_scales: As key_scales.
        fmt: The flavour of FP8 codes.
        window: How many last tokens are seen; None: all.

    Returns:
        [sequences, heads, head_size] in the dtype of the query.
    """
    block_table, lengths = as_read(block_table, lengths)
    sequences, heads, size = query.shape
    _, kv_heads, block_size, _ = cache.shape
    queries = heads // kv_heads
    tokens = sum(lengths.tolist())
    threads = threads_for(2 * tokens * heads * size)
    length = piece(tokens * kv_heads, threads, _SHORTEST_PIECE)
    most_pieces = tokens // length + sequences
    numbers = partial(padded(queries, ROWS), size) * kv_heads
    pieces, finished = memory_of(numbers, sequences * kv_heads, most_pieces, threads)
    own = torch.empty(threads, _own(queries, size), dtype=torch.float32)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    itemsize = query.element_size()
    _kernel(
        threads,
        query=query.data_ptr(),
        query_sequence=query.stride(0) * itemsize,
        query_head=query.stride(1) * itemsize,
        query_kind=KINDS[query.dtype],
        cache=cache.data_ptr(),
        cache_block=cache.stride(0),
        cache_head=cache.stride(1),
        max_code=fmt.max_code,
        block_size=block_size,
        table=block_table.data_ptr(),
        table_sequence=block_table.stride(0) * 4,
        lengths=lengths.data_ptr(),
        sequences=sequences,
        heads=heads,
        groups=kv_heads,
        group=queries,
        size=size,
        window=window or 2**40,
        key_scales=key_scales.data_ptr(),
        key_step=key_scales.ndim,
        value_scales=value_scales.data_ptr(),
        value_step=value_scales.ndim,
        piece=length,
        pieces=most_pieces,
        finished=finished.data_ptr(),
        partial=pieces.data_ptr(),
        own=own.data_ptr(),
        own_size=own.stride(0) * 4,
        out=out.data_ptr(),
        out_kind=KINDS[query.dtype],
        logit_scale=logit_scale,
    )
    return out


def load() -> None:
    """Compiles decode, or loads it from disk, so that no request waits."""
    _kernel.compile()


def _own(queries: int, size: int) -> int:
    """float32 numbers of a thread: queries, a result, a tile, its logits, decays."""
    count = padded(queries, ROWS)
    return count * (size + TILE + 1) + partial(count, size) + TILE * size + LANES


@njit
def _read_queries(a, sequence, head, scale, target):
    """Reads queries of a kv head, scaled; rows that fill up to ROWS become zero."""
    source = a.query + sequence * a.query_sequence + head * a.query_head
    for i in range(a.group):
        row = target + 4 * i * a.size
        rows.read_row(a.query_kind, 0, source + i * a.query_head, row, a.size)
        rows.scale_row(row, row, a.size, scale)
    for i in range(a.group, padded(a.group, ROWS)):
        rows.zero_row(target + 4 * i * a.size, a.size)


@njit
def _unit(a, table, head, token):
    """Where a head of a block begins, and the place of a token in it."""
    block = np.int64(table[token // a.block_size])
    return a.cache + block * a.cache_block + head * a.cache_head, token % a.block_size


@njit
def _read_keys(a, table, head, start, tokens, tile):
    for u in range(0, tokens, UNIT):
        keys, place = _unit(a, table, head, start + u)
        target = tile + 4 * u
        rows.fp8_columns(
            keys + place, a.block_size, target, TILE * 4, a.size, a.max_code
        )


@njit
def _read_values(a, table, head, start, tokens, tile):
    for u in range(0, tokens, UNIT):
        keys, place = _unit(a, table, head, start + u)
        values = keys + (a.block_size + place) * a.size
        count = min(UNIT, tokens - u) * a.size
        rows.fp8_row(values, tile + 4 * u * a.size, count, a.max_code)


@njit
def _hide(logits, count, first, stop, computed):
    """Takes back the logits of tokens before ``first`` and from ``stop`` on."""
    all_of = carray(pointer(logits), (count, TILE), np.float32)
    for r in range(count):
        for t in range(first):
            all_of[r, t] = LOWEST
        for t in range(stop, computed):
            all_of[r, t] = LOWEST


@njit
def _attend(
    a, sequence, head, heads, start, stop, length, memory, highest, total, sums
):
    """Attends with the queries of a kv head; see ``pieces.worker``."""
    count, size = padded(heads, ROWS), a.size
    kv_head = head // a.group
    unit = np.float32(rows.FP8_UNIT)
    key_scale = floats(a.key_scales + 4 * kv_head * a.key_step, 1)[0]
    value_scale = floats(a.value_scales + 4 * kv_head * a.value_step, 1)[0]
    query = memory
    tile = query + 4 * count * size
    logits = tile + 4 * TILE * size
    decay = logits + 4 * TILE * count
    _read_queries(a, sequence, head, a.logit_scale * (key_scale * unit), query)
    floats(decay, count)[:] = 0
    table = table_of(a, sequence)
    start = max(start, length - a.window)
    if start >= stop:
        return value_scale * unit
    for t in range(start // UNIT * UNIT, stop, TILE):
        tokens = min(TILE, stop - t)
        first = max(0, start - t)
        computed = padded(tokens, UNIT)
        _read_keys(a, table, kv_head, t, tokens, tile)
        floats(logits, count * TILE)[:] = 0
        outer(
            logits, 4 * TILE, count, query, 4, 4 * size, decay, tile, 4 * TILE, size,
            computed,
        )  # fmt: skip
        _hide(logits, count, first, tokens, computed)
        for r in range(count):
            softmax_row(
                logits + 4 * TILE * r, computed, highest + 4 * r, total + 4 * r,
                decay + 4 * r,
            )  # fmt: skip
        _read_values(a, table, kv_head, t, tokens, tile)
        outer(
            sums, 4 * size, count, logits + 4 * first, 4, 4 * TILE, decay,
            tile + 4 * size * first, 4 * size, tokens - first, size,
        )  # fmt: skip
    return value_scale * unit


_work = worker(_attend, ROWS)


def _decode(record):
    _work(record)


_kernel = Kernel(_decode, _RECORD)
