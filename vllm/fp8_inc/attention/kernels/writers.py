# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes new tokens into the paged caches: the device's cast, and the scatter."""

import torch
from numba import carray, njit

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.casts import cast_row, scatter_row, transpose
from vllm.fp8_inc.attention.kernels.runtime import (
    KINDS,
    SMALL,
    Kernel,
    record_type,
)
from vllm.fp8_inc.attention.kernels.vectors import (
    address_of,
    fetch_add,
    floats,
    pointer,
)
from vllm.fp8_inc.formats import Fp8Format

# Tokens that a thread takes at once.
_TOKENS = 64
# Tokens that follow each other in a block and are transposed at once.
_RUN = rows.AT_ONCE
# What one number costs, in multiply-adds.
_COST = 8

# Strides in bytes, sizes in elements; the first 7 and 9 fields come with each call.
_MLA_RECORD = record_type(
    "latent latent_token rope rope_token kind slots tokens "
    "latent_size size cache cache_block cache_row cache_kind block_size own nan_sign",
    "quant_scale maximum",
)
_GQA_RECORD = record_type(
    "key key_token key_head value value_token value_head kind slots tokens "
    "cache cache_block cache_head block_size heads head_size own nan_sign "
    "key_scales key_step value_scales value_step",
    "maximum",
)


class LatentWriter:
    """Writes rows [latent, rope] into one cache, which the caller keeps alive.

    Args:
        cache: [blocks, block_size, latent + rope], written: uint8 for codes, or
            bfloat16, float16 or float32.
        latent_size: A multiple of 16, as the rope's is.
        quant_scale: q = cast(x * quant_scale), in the dtype of the activations; for
            uint8 only.
        fmt: The flavour of codes.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        latent_size: int,
        quant_scale: float,
        fmt: Fp8Format,
    ) -> None:
        self._size = size = cache.shape[-1]
        self._threads = torch.get_num_threads()
        self._own = torch.empty(self._threads * size, dtype=torch.float32)
        self._run = latents.bind(
            7,
            latent_size=latent_size,
            size=size,
            cache=cache.data_ptr(),
            cache_block=cache.stride(0) * cache.element_size(),
            cache_row=cache.stride(1) * cache.element_size(),
            cache_kind=KINDS[cache.dtype],
            block_size=cache.shape[1],
            own=self._own.data_ptr(),
            nan_sign=_nan_sign(fmt),
            quant_scale=quant_scale,
            maximum=fmt.max,
        )

    def write(
        self, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes one row for each token.

        Args:
            latent: [tokens, latent] activations; the last dimension is contiguous.
            rope: [tokens, rope], as latent.
            slots: [tokens], block * block_size + offset; -1: not written.
        """
        slots = _int64(slots)
        tokens = slots.numel()
        itemsize = latent.itemsize
        self._run(
            self._threads if tokens * self._size * _COST >= SMALL else 1,
            latent.data_ptr(),
            latent.stride(0) * itemsize,
            rope.data_ptr(),
            rope.stride(0) * itemsize,
            KINDS[latent.dtype],
            slots.data_ptr(),
            tokens,
        )


class HeadsWriter:
    """Writes K and V of every head into one cache, laid out as upstream's on CPU.

    The caller keeps the cache alive.

    Args:
        cache: [blocks, kv_heads, block_size, 2 * head_size] uint8, written: in each
            head of a block K as [head_size, block_size], then V as
            [block_size, head_size]. head_size is a multiple of 16.
        key_scales: [] or [kv_heads] quant scales; q = cast(x * quant_scale).
        value_scales: As key_scales.
        fmt: The flavour of codes.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        key_scales: torch.Tensor,
        value_scales: torch.Tensor,
        fmt: Fp8Format,
    ) -> None:
        _, heads, block_size, both = cache.shape
        self._numbers = heads * both
        self._threads = torch.get_num_threads()
        # Memory that the record points to.
        self._kept = (
            torch.empty(self._threads * _RUN * self._numbers // 2, dtype=torch.uint8),
            key_scales.float(),
            value_scales.float(),
        )
        own, key_scales, value_scales = self._kept
        self._run = heads_of_gqa.bind(
            9,
            cache=cache.data_ptr(),
            cache_block=cache.stride(0),
            cache_head=cache.stride(1),
            block_size=block_size,
            heads=heads,
            head_size=both // 2,
            own=own.data_ptr(),
            nan_sign=_nan_sign(fmt),
            key_scales=key_scales.data_ptr(),
            key_step=key_scales.ndim,
            value_scales=value_scales.data_ptr(),
            value_step=value_scales.ndim,
            maximum=fmt.max,
        )

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes K and V of each token.

        Args:
            key: [tokens, kv_heads, head_size] activations; the last dimension is
                contiguous.
            value: As key.
            slots: [tokens], block * block_size + offset; -1: not written.
        """
        slots = _int64(slots)
        tokens = slots.numel()
        itemsize = key.itemsize
        key_token, key_head, _ = key.stride()
        value_token, value_head, _ = value.stride()
        self._run(
            self._threads if tokens * self._numbers * _COST >= SMALL else 1,
            key.data_ptr(),
            key_token * itemsize,
            key_head * itemsize,
            value.data_ptr(),
            value_token * itemsize,
            value_head * itemsize,
            KINDS[key.dtype],
            slots.data_ptr(),
            tokens,
        )


def _int64(slots: torch.Tensor) -> torch.Tensor:
    """What the kernels read; vLLM's are so already."""
    if slots.dtype is torch.int64 and slots.is_contiguous():
        return slots
    return slots.long().contiguous()


def _nan_sign(fmt: Fp8Format) -> int:
    return 0x80 if fmt.nan_keeps_sign else 0


@njit
def _write_part(a, source, size, target, own):
    """A part of a row, to codes or to another dtype."""
    if a.cache_kind == rows.FP8:
        cast_row(a.kind, source, target, size, a.quant_scale, a.maximum, a.nan_sign)
        return
    rows.read_row(a.kind, 0, source, own, size)
    rows.write_row(a.cache_kind, own, target, size)


@njit
def _latent_row(a, token, slot, own):
    target = a.cache + slot // a.block_size * a.cache_block
    target += slot % a.block_size * a.cache_row
    itemsize = rows.itemsize(a.cache_kind)
    _write_part(a, a.latent + token * a.latent_token, a.latent_size, target, own)
    target += itemsize * a.latent_size
    rope = a.rope + token * a.rope_token
    _write_part(a, rope, a.size - a.latent_size, target, own)


@njit
def _run_from(a, slots, token, stop):
    """How many tokens from ``token`` on follow each other in a block; _RUN at most."""
    slot = slots[token]
    most = min(_RUN, stop - token, a.block_size - slot % a.block_size)
    run = 1
    while run < most and slots[token + run] == slot + run:
        run += 1
    return run


@njit
def _cast(a, source, target, scale):
    """A head of a token."""
    size = a.head_size
    cast_row(a.kind, source, target, size, scale, a.maximum, a.nan_sign)


@njit
def _write_run(a, token, slot, run, own):
    """All heads of ``run`` tokens, in the order in which they lie; K goes to columns.

    Args:
        own: Memory for codes of K, [heads, run, head_size].
    """
    block = a.cache + slot // a.block_size * a.cache_block
    place = slot % a.block_size
    size = a.head_size
    key_scales = floats(a.key_scales, 1 + (a.heads - 1) * a.key_step)
    value_scales = floats(a.value_scales, 1 + (a.heads - 1) * a.value_step)
    for i in range(run):
        key = a.key + (token + i) * a.key_token
        for h in range(a.heads):
            to = own + (h * run + i) * size
            _cast(a, key + h * a.key_head, to, key_scales[h * a.key_step])
    for i in range(run):
        value = a.value + (token + i) * a.value_token
        for h in range(a.heads):
            to = block + h * a.cache_head + (a.block_size + place + i) * size
            _cast(a, value + h * a.value_head, to, value_scales[h * a.value_step])
    for h in range(a.heads):
        keys = block + h * a.cache_head + place
        codes = own + h * run * size
        if run == _RUN:
            transpose(codes, size, keys, a.block_size, size)
        else:
            for i in range(run):
                scatter_row(codes + i * size, keys + i, a.block_size, size)


def _latents_of(record):
    a = carray(record, 1)[0]
    counters = address_of(record)
    own = fetch_add(counters + 8, 1) * a.size * 4 + a.own
    slots = carray(pointer(a.slots), a.tokens, rows.SLOT)
    start = fetch_add(counters, _TOKENS)
    while start < a.tokens:
        for token in range(start, min(start + _TOKENS, a.tokens)):
            if slots[token] >= 0:
                _latent_row(a, token, slots[token], own)
        start = fetch_add(counters, _TOKENS)


def _heads_of(record):
    a = carray(record, 1)[0]
    counters = address_of(record)
    own = a.own + fetch_add(counters + 8, 1) * _RUN * a.heads * a.head_size
    slots = carray(pointer(a.slots), a.tokens, rows.SLOT)
    token = fetch_add(counters, _TOKENS)
    while token < a.tokens:
        stop = min(token + _TOKENS, a.tokens)
        while token < stop:
            run = 1
            if slots[token] >= 0:
                run = _run_from(a, slots, token, stop)
                _write_run(a, token, slots[token], run, own)
            token += run
        token = fetch_add(counters, _TOKENS)


latents = Kernel(_latents_of, _MLA_RECORD)
heads_of_gqa = Kernel(_heads_of, _GQA_RECORD)
