# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes new tokens into the paged caches: the device's cast, and the scatter."""

import torch
from numba import carray, njit

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.runtime import (
    KINDS,
    Kernel,
    record_type,
    threads_for,
)
from vllm.fp8_inc.attention.kernels.vectors import (
    address_of,
    fetch_add,
    floats,
    pointer,
)
from vllm.fp8_inc.formats import Fp8Format

# Tokens that a thread takes at once.
_TOKENS = 16
# What one number costs, in multiply-adds.
_COST = 16

# Strides in bytes, sizes in elements.
_MLA_RECORD = record_type(
    "latent latent_token latent_size rope rope_token rope_size kind "
    "slots tokens cache cache_block cache_row cache_kind block_size own nan_sign",
    "quant_scale maximum",
)
_GQA_RECORD = record_type(
    "key key_token key_head value value_token value_head kind slots tokens "
    "cache cache_block cache_head block_size heads head_size own nan_sign "
    "key_scales key_step value_scales value_step",
    "maximum",
)


def write_latents(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    quant_scale: float,
    fmt: Fp8Format,
) -> None:
    """Writes one row [latent, rope] for each token.

    Args:
        latent: [tokens, latent] activations; the last dimension is contiguous and a
            multiple of 16.
        rope: [tokens, rope], as latent.
        cache: [blocks, block_size, latent + rope], written: uint8 for codes, or
            bfloat16, float16 or float32.
        slots: [tokens], block * block_size + offset; -1: not written.
        quant_scale: q = cast(x * quant_scale), in the dtype of the activations; for
            uint8 only.
        fmt: The flavour of codes.
    """
    slots = slots.flatten().long()  # what the kernel reads; vLLM's are so already
    size = cache.shape[-1]
    itemsize = latent.element_size()
    threads = threads_for(len(slots) * size * _COST)
    own = torch.empty(threads * size, dtype=torch.float32)
    latents(
        threads,
        latent=latent.data_ptr(),
        latent_token=latent.stride(0) * itemsize,
        latent_size=latent.shape[-1],
        rope=rope.data_ptr(),
        rope_token=rope.stride(0) * itemsize,
        rope_size=rope.shape[-1],
        kind=KINDS[latent.dtype],
        slots=slots.data_ptr(),
        tokens=len(slots),
        cache=cache.data_ptr(),
        cache_block=cache.stride(0) * cache.element_size(),
        cache_row=cache.stride(1) * cache.element_size(),
        cache_kind=KINDS[cache.dtype],
        block_size=cache.shape[1],
        own=own.data_ptr(),
        nan_sign=_nan_sign(fmt),
        quant_scale=quant_scale,
        maximum=fmt.max,
    )


def write_heads(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    fmt: Fp8Format,
) -> None:
    """Writes K and V of every head of each token, as upstream's CPU cache has them.

    Args:
        key: [tokens, kv_heads, head_size] activations; the last dimension is
            contiguous and a multiple of 16.
        value: As key.
        cache: [blocks, kv_heads, block_size, 2 * head_size] uint8, written: in each
            head of a block K as [head_size, block_size], then V as
            [block_size, head_size].
        slots: [tokens]; -1: not written.
        key_scales: [] or [kv_heads] quant scales; q = cast(x * quant_scale).
        value_scales: As key_scales.
        fmt: The flavour of codes.
    """
    slots = slots.flatten().long()
    _, heads, block_size, _ = cache.shape
    key_scales, value_scales = key_scales.float(), value_scales.float()
    itemsize = key.element_size()
    threads = threads_for(2 * key.numel() * _COST)
    own = torch.empty(threads * key.shape[-1], dtype=torch.float32)
    heads_of_gqa(
        threads,
        key=key.data_ptr(),
        key_token=key.stride(0) * itemsize,
        key_head=key.stride(1) * itemsize,
        value=value.data_ptr(),
        value_token=value.stride(0) * itemsize,
        value_head=value.stride(1) * itemsize,
        kind=KINDS[key.dtype],
        slots=slots.data_ptr(),
        tokens=len(slots),
        cache=cache.data_ptr(),
        cache_block=cache.stride(0),
        cache_head=cache.stride(1),
        block_size=block_size,
        heads=heads,
        head_size=key.shape[-1],
        own=own.data_ptr(),
        nan_sign=_nan_sign(fmt),
        key_scales=key_scales.data_ptr(),
        value_scales=value_scales.data_ptr(),
        key_step=key_scales.ndim,
        value_step=value_scales.ndim,
        maximum=fmt.max,
    )


def _nan_sign(fmt: Fp8Format) -> int:
    return 0x80 if fmt.nan_keeps_sign else 0


@njit
def _write_part(a, source, size, target, own):
    """A part of a row, to codes or to another dtype."""
    if a.cache_kind == rows.FP8:
        rows.fp8_cast_row(
            a.kind, source, target, size, a.quant_scale, a.maximum, a.nan_sign
        )
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
    _write_part(a, a.rope + token * a.rope_token, a.rope_size, target, own)


@njit
def _head_rows(a, token, slot, own):
    """All heads of a token; K goes to a column."""
    block = a.cache + slot // a.block_size * a.cache_block
    place = slot % a.block_size
    size = a.head_size
    codes = carray(pointer(own), size, rows.CODE)
    key_scales = floats(a.key_scales, 1 + (a.heads - 1) * a.key_step)
    value_scales = floats(a.value_scales, 1 + (a.heads - 1) * a.value_step)
    for h in range(a.heads):
        head = block + h * a.cache_head
        source = a.key + token * a.key_token + h * a.key_head
        scale = key_scales[h * a.key_step]
        rows.fp8_cast_row(a.kind, source, own, size, scale, a.maximum, a.nan_sign)
        column = carray(pointer(head), (size, a.block_size), rows.CODE)
        for i in range(size):
            column[i, place] = codes[i]
        source = a.value + token * a.value_token + h * a.value_head
        scale = value_scales[h * a.value_step]
        target = head + (a.block_size + place) * size
        rows.fp8_cast_row(a.kind, source, target, size, scale, a.maximum, a.nan_sign)


def _latents_of(record):
    a = carray(record, 1)[0]
    counters = address_of(record)
    own = fetch_add(counters + 8, 1) * (a.latent_size + a.rope_size) * 4 + a.own
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
    own = fetch_add(counters + 8, 1) * a.head_size * 4 + a.own
    slots = carray(pointer(a.slots), a.tokens, rows.SLOT)
    start = fetch_add(counters, _TOKENS)
    while start < a.tokens:
        for token in range(start, min(start + _TOKENS, a.tokens)):
            if slots[token] >= 0:
                _head_rows(a, token, slots[token], own)
        start = fetch_add(counters, _TOKENS)


latents = Kernel(_latents_of, _MLA_RECORD)
heads_of_gqa = Kernel(_heads_of, _GQA_RECORD)
