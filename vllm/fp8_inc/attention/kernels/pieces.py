# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Long sequences in pieces, so that a batch of one keeps every core busy.

Each piece has its highest logits, totals and sums (``partial`` numbers); whoever
finishes the last piece of a sequence joins them.
"""

import math

import numpy as np
import torch
from numba import carray, njit
from numba.extending import register_jitable

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.tiles import LOWEST
from vllm.fp8_inc.attention.kernels.vectors import LANES, floats, pointer

# How many pieces a thread should get.
_PIECES_A_THREAD = 4


def piece(tokens: int, threads: int, shortest: int) -> int:
    """Tokens in a piece.

    Args:
        tokens: Of all sequences and groups of heads.
        threads: That share them.
        shortest: A piece is a multiple of it.
    """
    if threads == 1:
        return 2**40
    wanted = max(shortest, tokens / (threads * _PIECES_A_THREAD))
    return math.ceil(wanted / shortest) * shortest


def as_read(
    block_table: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as the kernels read them, int32 and contiguous; vLLM's are so already."""
    block_table, lengths = block_table.int(), lengths.int().contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    return block_table, lengths


_NONE = torch.empty(0, dtype=torch.float32)


def memory_of(
    numbers: int, counters: int, pieces: int, threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What pieces hold, and how many of each sequence are done; one thread has none."""
    if threads == 1:
        return _NONE, _NONE
    partials = torch.empty(numbers * pieces, dtype=torch.float32)
    return partials, torch.zeros(counters, dtype=torch.int64)


@register_jitable
def padded(count, to):
    return -(-count // to) * to


@register_jitable
def partial(group, size):
    """float32 numbers of a piece: highest logits, totals, sums."""
    return 2 * padded(group, LANES) + group * size


@njit
def piece_of(a, number):
    """Which sequence piece ``number`` belongs to, and that sequence's pieces.

    Returns:
        sequence (-1: no such piece), its first piece, how many it has, its length.
    """
    lengths = carray(pointer(a.lengths), a.sequences, np.int32)
    first = 0
    for sequence in range(a.sequences):
        length = np.int64(lengths[sequence])
        pieces = max(1, -(-length // a.piece))
        if number < first + pieces:
            return sequence, first, pieces, length
        first += pieces
    return -1, first, 0, 0


@njit
def clear(highest, total, sums, width, size):
    """Before the first tile."""
    floats(highest, width)[:] = LOWEST
    floats(total, width)[:] = 0
    floats(sums, size)[:] = 0


@njit
def join(first, count, width, one, size, number):
    """Joins ``number`` pieces of ``one`` numbers each into the first."""
    pieces = carray(pointer(first), (number, one), np.float32)
    for r in range(count):
        highest = pieces[:, r].max()
        total = np.float32(0)
        start = 2 * width + r * size
        for p in range(number):
            weight = np.exp(pieces[p, r] - highest)
            total += weight * pieces[p, width + r]
            for i in range(start, start + size):
                before = pieces[0, i] if p > 0 else np.float32(0)
                pieces[0, i] = before + weight * pieces[p, i]
        pieces[0, width + r] = total


@njit
def write_result(a, first, count, size, out_scale, total, sums):
    """Writes ``count`` rows from row ``first`` on; what attended to nothing is zero."""
    totals = floats(total, count)
    itemsize = rows.itemsize(a.out_kind)
    for r in range(count):
        factor = out_scale / totals[r] if totals[r] != 0 else np.float32(0)
        row = sums + 4 * r * size
        rows.scale_row(row, row, size, factor)
        rows.write_row(a.out_kind, row, a.out + itemsize * (first + r) * size, size)
