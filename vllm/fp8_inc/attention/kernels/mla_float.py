# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MLA's tile in float32: any dtype of query and cache, any CPU."""

import numpy as np
from numba import njit

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.latents import RECORD, prefetch, row_of
from vllm.fp8_inc.attention.kernels.pieces import padded, partial, table_of, worker
from vllm.fp8_inc.attention.kernels.runtime import Kernel
from vllm.fp8_inc.attention.kernels.tiles import (
    ROWS,
    TOKENS,
    logits_of,
    outer,
    softmax_of,
)
from vllm.fp8_inc.attention.kernels.vectors import LANES

# Heads are padded to a multiple of STEP. A tile and GROUP heads that share it fill
# half of a second-level cache of 512 KiB.
STEP = ROWS
GROUP = 32
TILE = 48


def own(group: int, latent: int, rope: int) -> int:
    """float32 numbers of a thread: queries, a result, a tile, its logits, decays."""
    lines = group * (latent + rope) + partial(group, latent) + TILE * (latent + rope)
    return lines + (TILE + 1) * padded(group, LANES)


@njit
def _read_query(a, sequence, head, count, target):
    """Reads ``count`` heads, scaled; rows that fill up to STEP become zero."""
    size = a.size + a.rope
    latent = a.latent_query + sequence * a.latent_query_sequence
    rope = a.rope_query + sequence * a.rope_query_sequence
    for i in range(count):
        row = target + 4 * i * size
        h = head + i
        rows.read_row(a.query_kind, 0, latent + h * a.latent_query_head, row, a.size)
        rope_row = row + 4 * a.size
        rows.read_row(a.query_kind, 0, rope + h * a.rope_query_head, rope_row, a.rope)
        rows.scale_row(row, row, size, a.logit_scale)
    for i in range(count, padded(count, STEP)):
        rows.zero_row(target + 4 * i * size, size)


@njit
def _read_tile(a, table, start, tokens, stop, tile):
    """Reads latents; asks for those of the next tile; adds zeros up to TOKENS."""
    size = a.size + a.rope
    for i in range(tokens):
        prefetch(a, table, start + TILE + i, stop)
        row = row_of(a, table, start + i)
        rows.read_row(a.cache_kind, a.max_code, row, tile + 4 * i * size, size)
    for i in range(tokens, padded(tokens, TOKENS)):
        rows.zero_row(tile + 4 * i * size, size)


@njit
def _attend(
    a, sequence, head, heads, start, stop, length, memory, highest, total, sums
):
    """Attends with ``heads`` heads; see ``pieces.worker``."""
    row = 4 * (a.size + a.rope)
    count = padded(heads, STEP)
    width = 4 * padded(count, LANES)
    query = memory
    tile = query + count * row
    logits = tile + TILE * row
    decay = logits + TILE * width
    table = table_of(a, sequence)
    _read_query(a, sequence, head, heads, query)
    for t in range(start, stop, TILE):
        tokens = min(TILE, stop - t)
        _read_tile(a, table, t, tokens, stop, tile)
        computed = padded(tokens, TOKENS)
        logits_of(query, row, count, tile, row, computed, row // 4, logits, width)
        softmax_of(logits, width, count, tokens, highest, total, decay)
        outer(
            sums, 4 * a.size, count, logits, width, 4, decay, tile, row, tokens, a.size
        )
    return np.float32(a.out_scale)


_work = worker(_attend, STEP)


def _decode(record):
    _work(record)


kernel = Kernel(_decode, RECORD)
