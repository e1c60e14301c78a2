# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MLA's products with the two halves of kv_b_proj, head by head, in float32.

torch multiplies bfloat16 slowly where the CPU has no instructions for it. Here rows of
the weight become float32 a tile at a time, so no second copy of it is held.
"""

import numpy as np
import torch
from numba import carray, njit
from numba.extending import register_jitable

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.pieces import padded
from vllm.fp8_inc.attention.kernels.runtime import (
    KINDS,
    Kernel,
    record_type,
    threads_for,
)
from vllm.fp8_inc.attention.kernels.tiles import ROWS, TOKENS, logits_of, outer
from vllm.fp8_inc.attention.kernels.vectors import (
    address_of,
    fetch_add,
    floats,
    pointer,
)

# Tokens that share a tile of the weight, and rows of a tile.
_GROUP = 32
_TILE = 48
_SMALL_TILE = 12  # of up to ROWS tokens: it stays in the first-level cache

# Strides in bytes, sizes in elements. ``weight`` has ``wide`` rows of ``latent``.
_RECORD = record_type(
    "x x_token x_head weight weight_head weight_row weight_kind out out_token out_head "
    "tokens heads wide latent to_latent own own_size"
)


def to_latent(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies queries with W_UK.

    Args:
        x: [tokens, heads, nope], bfloat16, float16 or float32.
        weight: [heads, nope, latent] of such a dtype, the last dimension contiguous and
            a multiple of 16.

    Returns:
        [tokens, heads, latent] in the dtype of x, rounded once.
    """
    return _multiply(x, weight, True)


def from_latent(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies what attention made of latents with W_UV.

    Args:
        x: [tokens, heads, latent], bfloat16, float16 or float32.
        weight: [heads, latent, value] of such a dtype. Held by rows of latents, as a
            slice of kv_b_proj's weight is, it is not copied.

    Returns:
        [tokens, heads, value] in the dtype of x, rounded once.
    """
    return _multiply(x, weight.transpose(1, 2), False)


def _multiply(x: torch.Tensor, weight: torch.Tensor, to: bool) -> torch.Tensor:
    """With ``weight`` [heads, wide, latent], from or to its last dimension."""
    if weight.stride(2) != 1:
        weight = weight.contiguous()
    tokens, heads, _ = x.shape
    _, wide, latent = weight.shape
    values = x.float()
    if values.stride(2) != 1:
        values = values.contiguous()
    out = torch.empty(tokens, heads, latent if to else wide, dtype=torch.float32)
    threads = threads_for(tokens * weight.numel())
    own = torch.empty(threads, _own(wide, latent), dtype=torch.float32)
    size = weight.element_size()
    kernel(
        threads,
        x=values.data_ptr(),
        x_token=4 * values.stride(0),
        x_head=4 * values.stride(1),
        weight=weight.data_ptr(),
        weight_head=size * weight.stride(0),
        weight_row=size * weight.stride(1),
        weight_kind=KINDS[weight.dtype],
        out=out.data_ptr(),
        out_token=4 * out.stride(0),
        out_head=4 * out.stride(1),
        tokens=tokens,
        heads=heads,
        wide=wide,
        latent=latent,
        to_latent=to,
        own=own.data_ptr(),
        own_size=4 * own.stride(0),
    )
    return out.to(x.dtype)


def _own(wide: int, latent: int) -> int:
    """float32 numbers of a thread: a tile, rows of latents, the other side, ones."""
    return (_TILE + _GROUP) * _pitch(latent) + (max(wide, _TILE) + 1) * _GROUP


@register_jitable
def _pitch(latent):
    """float32 numbers between rows; of a power of 2, all would share cache sets."""
    return latent + 16


@njit
def _read_tile(a, head, start, count, tile):
    """Reads rows of the weight, asks for later ones; zeros fill them up to TOKENS."""
    row = a.weight + head * a.weight_head + start * a.weight_row
    for i in range(count):
        to = tile + 4 * i * _pitch(a.latent)
        rows.prefetch_row(row + _TILE * a.weight_row, a.weight_row)
        rows.read_row(a.weight_kind, 0, row, to, a.latent)
        row += a.weight_row
    for i in range(count, padded(count, TOKENS)):
        rows.zero_row(tile + 4 * i * _pitch(a.latent), a.latent)


@njit
def _absorb(a, head, first, count, tile, sums, side, ones):
    """out[token] = sum over i of x[token, i] * weight[i]."""
    line = 4 * _GROUP
    left = carray(pointer(side), (a.wide, _GROUP), np.float32)
    left[:, :] = 0
    for t in range(count):
        x = floats(a.x + (first + t) * a.x_token + head * a.x_head, a.wide)
        for i in range(a.wide):
            left[i, t] = x[i]
    computed, row = padded(count, ROWS), 4 * _pitch(a.latent)
    floats(sums, computed * _pitch(a.latent))[:] = 0
    step = _TILE if count > ROWS else _SMALL_TILE
    for start in range(0, a.wide, step):
        several = min(step, a.wide - start)
        _read_tile(a, head, start, several, tile)
        at = side + start * line
        outer(sums, row, computed, at, line, 4, ones, tile, row, several, a.latent)
    for t in range(count):
        to = a.out + (first + t) * a.out_token + head * a.out_head
        rows.float_row(sums + t * row, to, a.latent)


@njit
def _expand(a, head, first, count, tile, latents, side):
    """out[token, i] = x[token] . weight[i]."""
    line, row = 4 * _GROUP, 4 * _pitch(a.latent)
    computed = padded(count, ROWS)
    for t in range(count):
        x = a.x + (first + t) * a.x_token + head * a.x_head
        rows.float_row(x, latents + t * row, a.latent)
    for t in range(count, computed):
        rows.zero_row(latents + t * row, a.latent)
    found = carray(pointer(side), (_TILE, _GROUP), np.float32)
    step = _TILE if count > ROWS else _SMALL_TILE
    for start in range(0, a.wide, step):
        several = min(step, a.wide - start)
        _read_tile(a, head, start, several, tile)
        padding = padded(several, TOKENS)
        logits_of(latents, row, computed, tile, row, padding, a.latent, side, line)
        for t in range(count):
            to = floats(a.out + (first + t) * a.out_token + head * a.out_head, a.wide)
            for i in range(several):
                to[start + i] = found[i, t]


@njit
def _multiply_heads(record):
    """Takes a head and some tokens at a time."""
    a = carray(record, 1)[0]
    counters = address_of(record)
    tile = a.own + fetch_add(counters + 8, 1) * a.own_size
    latents = tile + 4 * _TILE * _pitch(a.latent)
    ones = latents + 4 * _GROUP * _pitch(a.latent)
    side = ones + 4 * _GROUP
    floats(ones, _GROUP)[:] = 1
    groups = -(-a.tokens // _GROUP)
    item = fetch_add(counters, 1)
    while item < a.heads * groups:
        head, first = item // groups, item % groups * _GROUP
        count = min(_GROUP, a.tokens - first)
        if a.to_latent:
            _absorb(a, head, first, count, tile, latents, side, ones)
        else:
            _expand(a, head, first, count, tile, latents, side)
        item = fetch_add(counters, 1)


def _run(record):
    _multiply_heads(record)


kernel = Kernel(_run, _RECORD)
