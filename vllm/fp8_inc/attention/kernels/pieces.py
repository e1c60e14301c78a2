# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What threads take: long sequences in pieces, so that a batch of one keeps all busy.

Each piece has its highest logits, totals and sums (``partial`` numbers); whoever
finishes the last piece of a sequence joins them.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numba import carray, njit
from numba.extending import register_jitable

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.tiles import LOWEST
from vllm.fp8_inc.attention.kernels.vectors import (
    address_of,
    fetch_add,
    floats,
    pointer,
)

# Highest logits and totals are padded to it: the most lanes that any CPU has.
_WIDTH = 16
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
def partial(rows, size):
    """float32 numbers of a piece: highest logits, totals, sums of ``rows`` heads."""
    return 2 * padded(rows, _WIDTH) + rows * size


def worker(attend: Callable, step: int) -> Callable:
    """Makes what a kernel runs on each thread, of a record's address.

    An item is one piece of one sequence, for one group of heads. Fields of the record
    that are read here have one name in all kernels.

    Args:
        attend: Attends with a group to a piece; returns by what the result is
            multiplied.
        step: The number of heads is padded to a multiple of it; at most _WIDTH.
    """

    def compiled(function: Callable) -> Callable:
        # LLVM takes code loaded from disk for another kernel's where names are equal.
        function.__qualname__ = f"{attend.__module__}.{function.__name__}"
        return njit(function)

    @compiled
    def do(a, item, memory):
        number, group = item // a.groups, item % a.groups
        sequence, first, pieces, length = _piece_of(a, number)
        if sequence < 0:
            return
        head = group * a.group
        heads = min(a.group, a.heads - head)
        count = padded(heads, step)
        width = padded(count, _WIDTH)
        one = partial(padded(a.group, step), a.size)
        joined = a.partial + 4 * one * (first * a.groups + group * pieces)
        if pieces > 1:
            highest = joined + 4 * one * (number - first)
        else:
            highest = memory
            memory += 4 * one
        total = highest + 4 * width
        sums = total + 4 * width
        _clear(highest, total, sums, width, count * a.size)
        start = (number - first) * a.piece
        stop = min(length, start + a.piece)
        out_scale = attend(
            a, sequence, head, heads, start, stop, length, memory, highest, total, sums
        )
        if pieces > 1:
            done = fetch_add(a.finished + 8 * (sequence * a.groups + group), 1)
            if done < pieces - 1:
                return
            _join(joined, heads, width, one, a.size, pieces)
            total = joined + 4 * width
            sums = total + 4 * width
        _write_result(a, sequence * a.heads + head, heads, out_scale, total, sums)

    @compiled
    def work(record):
        a = carray(record, 1)[0]
        counters = address_of(record)
        memory = a.own + fetch_add(counters + 8, 1) * a.own_size
        items = a.pieces * a.groups
        item = fetch_add(counters, 1)
        while item < items:
            do(a, item, memory)
            item = fetch_add(counters, 1)

    return work


@njit
def table_of(a, sequence):
    """The blocks of a sequence."""
    address = a.table + sequence * a.table_sequence
    return carray(pointer(address), a.table_sequence // 4, np.int32)


@njit
def _piece_of(a, number):
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
def _clear(highest, total, sums, width, size):
    """Before the first tile."""
    floats(highest, width)[:] = LOWEST
    floats(total, width)[:] = 0
    floats(sums, size)[:] = 0


@njit
def _join(first, count, width, one, size, number):
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
def _write_result(a, first, count, out_scale, total, sums):
    """Writes ``count`` rows from row ``first`` on; what attended to nothing is zero."""
    totals = floats(total, count)
    itemsize = rows.itemsize(a.out_kind)
    for r in range(count):
        factor = out_scale / totals[r] if totals[r] != 0 else np.float32(0)
        row = sums + 4 * r * a.size
        target = a.out + itemsize * (first + r) * a.size
        rows.scale_row(row, row, a.size, factor)
        rows.write_row(a.out_kind, row, target, a.size)
