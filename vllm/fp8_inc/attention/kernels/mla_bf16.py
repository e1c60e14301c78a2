# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MLA's tile in bfloat16: a bfloat16 query over an FP8 or bfloat16 cache.

Both are exact in bfloat16; probabilities are rounded to it, their sum is of what was
rounded, and all sums are float32.
"""

import numpy as np
from numba import njit

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.latents import RECORD, prefetch, row_of
from vllm.fp8_inc.attention.kernels.pieces import padded, partial, table_of, worker
from vllm.fp8_inc.attention.kernels.runtime import Kernel
from vllm.fp8_inc.attention.kernels.tiles_bf16 import (
    WIDE,
    logits_of,
    output_of,
    pairs_to_column,
    read_bf16,
    read_fp8,
    softmax,
)
from vllm.fp8_inc.attention.kernels.vectors import floats

# As mla_float's. With 64 heads a tile, what it makes and the heads' sums take 330 KiB
# of a second-level cache of 1 MiB or more, which CPUs with AVX512_BF16 have.
STEP = WIDE
GROUP = 64
TILE = 48


def own(group: int, latent: int, rope: int) -> int:
    """float32 numbers of a thread, in the order in which ``_attend`` lays them out."""
    size = latent + rope
    numbers = (group + TILE + 1) * size // 2 + TILE // 2 * latent
    lines = (TILE + 1) + TILE // 2 + 1
    return partial(group, latent) + numbers + lines * group


@njit
def _read_query(a, sequence, head, heads, target, line):
    """Reads heads to [size / 2, heads padded to STEP] pairs of bfloat16."""
    floats(target, (a.size + a.rope) // 2 * (line // 4))[:] = 0
    latent = a.latent_query + sequence * a.latent_query_sequence
    rope = a.rope_query + sequence * a.rope_query_sequence
    for i in range(heads):
        h, to = head + i, target + 4 * i
        pairs_to_column(latent + h * a.latent_query_head, to, line, a.size)
        to += a.size // 2 * line
        pairs_to_column(rope + h * a.rope_query_head, to, line, a.rope)


@njit
def _read_tile(a, table, start, tokens, stop, tile, values, nothing):
    """Reads latents as keys and, in pairs of tokens, as values.

    Args:
        nothing: Zeros, which complete the last pair.
    """
    size = a.size + a.rope
    for i in range(0, tokens, 2):
        prefetch(a, table, start + TILE + i, stop)
        prefetch(a, table, start + TILE + i + 1, stop)
        first = row_of(a, table, start + i)
        second = nothing
        if i + 1 < tokens:
            second = row_of(a, table, start + i + 1)
        row, pairs = tile + 2 * i * size, values + 2 * i * a.size
        if a.cache_kind == rows.FP8:
            read_fp8(first, second, row, pairs, a.size, size, a.max_code)
        else:
            read_bf16(first, second, row, pairs, a.size, size, a.max_code)


@njit
def _attend(
    a, sequence, head, heads, start, stop, length, memory, highest, total, sums
):
    """Attends with ``heads`` heads; see ``pieces.worker``."""
    size = a.size + a.rope
    count = padded(heads, STEP)
    line = 4 * count
    query = memory
    nothing = query + size // 2 * line
    tile = nothing + 2 * size
    values = tile + TILE * 2 * size
    logits = values + TILE // 2 * 4 * a.size
    weights = logits + (TILE + 1) * line
    decay = weights + TILE // 2 * line
    table = table_of(a, sequence)
    floats(nothing, size // 2)[:] = 0
    _read_query(a, sequence, head, heads, query, line)
    for t in range(start, stop, TILE):
        tokens = min(TILE, stop - t)
        pairs = (tokens + 1) // 2
        _read_tile(a, table, t, tokens, stop, tile, values, nothing)
        logits_of(
            logits, line, tile, 2 * size, tokens, query, count, size, a.logit_scale
        )
        for r in range(0, line, 4 * WIDE):
            softmax(
                logits + r, line, tokens, weights + r, highest + r, total + r, decay + r
            )
        output_of(sums, a.size, weights, line, count, decay, values, pairs)
    return np.float32(a.out_scale)


_work = worker(_attend, STEP)


def _decode(record):
    _work(record)


kernel = Kernel(_decode, RECORD)
