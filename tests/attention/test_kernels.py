# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The numba kernels against torch in float64 and ml_dtypes, on shapes by hypothesis."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import device_numbers
from vllm.fp8_inc.attention.kernels import mla, writers
from vllm.fp8_inc.attention.kernels.mla import decode_latents
from vllm.fp8_inc.attention.kernels.writers import HeadsWriter, LatentWriter
from vllm.fp8_inc.formats import FORMATS, GAUDI2, GAUDI3

STORED = {
    "gaudi2": torch.uint8,
    "gaudi3": torch.uint8,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@st.composite
def shapes(draw):
    return {
        "stored": draw(st.sampled_from(list(STORED))),
        "lengths": draw(st.lists(st.integers(1, 400), min_size=1, max_size=5)),
        "heads": draw(st.integers(1, 70)),
        "latent": 16 * draw(st.integers(1, 9)),
        "rope": 16 * draw(st.integers(1, 4)),
        "block_size": 16 * draw(st.integers(1, 8)),
        "dequant_scale": draw(st.sampled_from([2.0**-20, 0.013, 1.0, 37.0, 1e4])),
        "largest_logit": draw(st.sampled_from([0.1, 5.0, 35.0])),
        "seed": draw(st.integers(0, 2**31)),
    }


def case(stored, lengths, heads, latent, rope, block_size, seed, **_):
    """A query, a cache of random codes with shuffled blocks, and its table."""
    generator = torch.Generator().manual_seed(seed)
    size = latent + rope
    most = -(-max(lengths) // block_size)
    blocks = most * len(lengths) + 3
    order = torch.randperm(blocks, generator=generator)[: most * len(lengths)]
    table = order.view(len(lengths), most).int()
    query = torch.randn(len(lengths), heads, size, generator=generator)
    if STORED[stored] == torch.uint8:
        high = FORMATS[stored].max_code + 1
        cache = torch.randint(high, (blocks, block_size, size), generator=generator)
        signs = torch.randint(2, cache.shape, generator=generator)
        cache = (cache + 128 * signs).to(torch.uint8)
    else:
        cache = torch.randn(blocks, block_size, size, generator=generator)
        cache = cache.to(STORED[stored])
    return query, cache, table, torch.tensor(lengths, dtype=torch.int32)


def values(cache, stored, dequant_scale):
    if STORED[stored] != torch.uint8:
        return cache.double()
    codes = device_numbers.decode(cache.numpy(), stored)
    return torch.from_numpy(codes) * dequant_scale


def attention(query, latents, table, lengths, latent, scale):
    """The oracle: softmax(q k^T) v of each sequence, float64."""
    out = []
    for q, blocks, length in zip(query.double(), table.long(), lengths.tolist()):
        rows = latents[blocks].flatten(0, 1)[:length]
        out.append((q @ rows.T * scale).softmax(-1) @ rows[:, :latent])
    return torch.stack(out)


def relative_error(out, expected):
    return ((out - expected).norm() / expected.norm()).item()


def compare(shape, dtype=torch.float32):
    query, cache, table, lengths = case(**shape)
    stored, latent = shape["stored"], shape["latent"]
    query = query.to(dtype)
    rows = values(cache, stored, shape["dequant_scale"])
    largest = max(
        (q.double() @ rows[blocks.long()].flatten(0, 1).T).abs().max()
        for q, blocks in zip(query, table)
    )
    scale = (shape["largest_logit"] / largest).item()
    fmt = FORMATS.get(stored, GAUDI3)
    parts = query.split([latent, shape["rope"]], dim=-1)
    out = decode_latents(
        *parts, cache, table, lengths, scale, shape["dequant_scale"], fmt
    )
    assert out.dtype == dtype
    expected = attention(query, rows, table, lengths, latent, scale)
    return relative_error(out.double(), expected)


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_decode_of_any_shape(shape):
    assert compare(shape) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", STORED)
def test_decode_rounds_nothing_but_the_result(stored, dtype):
    shape = {
        "stored": stored,
        "lengths": [1, 700, 33],
        "heads": 16,
        "latent": 512,
        "rope": 64,
        "block_size": 16,
        "dequant_scale": 0.013 if STORED[stored] == torch.uint8 else 1.0,
        "largest_logit": 35.0,
        "seed": 1,
    }
    assert compare(shape, dtype) < 2.5e-3


@settings(max_examples=10, deadline=None)
@given(shapes(), st.integers(2, 3), st.lists(st.integers(900, 1500), max_size=2))
def test_pieces_of_long_sequences_are_joined(shape, threads, long):
    """With the pieces and the threads of a machine with more cores."""
    shape["lengths"] = shape["lengths"] + long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "threads_for", lambda operations: threads)
        patch.setattr(mla, "_SHORTEST_PIECE", mla.mla_float.TILE)
        assert compare(shape) < 1e-5


@pytest.mark.parametrize("device", FORMATS)
def test_every_code_is_read(device):
    """One token a sequence: the result is the code's value, NaN and infinity too."""
    cache = torch.zeros(16, 16, 32, dtype=torch.uint8)
    cache[:, 0, :16] = torch.arange(256).view(16, 16)
    query = torch.zeros(16, 1, 16)
    table = torch.arange(16, dtype=torch.int32)[:, None]
    ones = torch.ones(16, dtype=torch.int32)
    out = decode_latents(query, query, cache, table, ones, 1.0, 0.5, FORMATS[device])
    expected = device_numbers.decode(np.arange(256), device) * 0.5
    finite = np.isfinite(expected).reshape(16, 16).all(axis=1)
    # 0 * NaN and 0 * infinity are NaN in the logit, hence in the whole row.
    np.testing.assert_array_equal(
        out.numpy()[finite, 0], expected.reshape(16, 16)[finite]
    )
    assert np.isnan(out.numpy()[~finite]).all()


def test_an_empty_sequence_gives_zeros():
    cache = torch.full((1, 16, 32), 0x7F, dtype=torch.uint8)
    query = torch.ones(1, 3, 16)
    zero = torch.zeros(1, dtype=torch.int32)
    out = decode_latents(query, query, cache, zero[None], zero, 1.0, 1.0, GAUDI3)
    assert not out.any()


@pytest.mark.parametrize("quant_scale", [1.0, 3.7, 0.013, 57.0])
@pytest.mark.parametrize("device", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_activation_is_cast(dtype, device, quant_scale):
    x = device_numbers.all_values(dtype).view(-1, 64)
    scale = torch.tensor(quant_scale).to(dtype).item()
    cache = torch.zeros(128, 8, 64, dtype=torch.uint8)
    slots = torch.arange(1024).flip(0)
    writer = LatentWriter(cache, 48, scale, FORMATS[device])
    writer.write(x[:, :48], x[:, 48:], slots)
    np.testing.assert_array_equal(
        cache.view(-1, 64).flip(0).numpy(), device_numbers.cast(x, scale, device)
    )


@pytest.mark.parametrize("device", FORMATS)
def test_float32_activations_are_cast_once(device):
    bits = torch.randint(-(2**31), 2**31 - 1, (4096, 32), dtype=torch.int32)
    near = torch.linspace(-500, 500, 4096 * 32).view(4096, 32)
    for x in (bits.view(torch.float32), near, near * 2.0**-12):
        cache = torch.zeros(256, 16, 32, dtype=torch.uint8)
        slots = torch.arange(4096)
        writer = LatentWriter(cache, 16, 1.7, FORMATS[device])
        writer.write(x[:, :16], x[:, 16:], slots)
        expected = device_numbers.cast(x, np.float32(1.7), device)
        np.testing.assert_array_equal(cache.view(-1, 32).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_an_unquantised_cache_is_written(dtype, target):
    x = torch.randn(40, 48).to(dtype)
    cache = torch.zeros(4, 16, 48, dtype=target)
    slots = torch.randperm(64)[:40]
    slots[7] = -1
    LatentWriter(cache, 32, 1.0, GAUDI3).write(x[:, :32], x[:, 32:], slots)
    expected = torch.zeros(64, 48, dtype=target)
    kept = slots >= 0
    expected[slots[kept]] = x[kept].to(target)
    assert torch.equal(cache.view(-1, 48), expected)


def heads_slots(tokens, block):
    """A prompt from the middle of a block on, decodes; one token is not written."""
    slots = torch.arange(tokens) + 2 * block + 5
    slots[40:56] = torch.tensor([block * (11 - i % 2) + i for i in range(16)])
    slots[3] = -1
    return slots


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("block", [16, 32])
def test_heads_are_written(threads, per_head, block, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(writers, "SMALL", 0)
    tokens, heads, size = 90, 3, 48
    packed = torch.randn(tokens, 2, heads, size).bfloat16()
    key, value = packed.unbind(1)
    quant = torch.tensor([1.5, 0.75, 40.0]) if per_head else torch.tensor(1.5)
    slots = heads_slots(tokens, block)
    cache = torch.zeros(12, heads, block, 2 * size, dtype=torch.uint8)
    writer = HeadsWriter(cache, quant, quant * 2, GAUDI2)
    writer.write(key, value, slots)
    halves = cache.view(12, heads, 2, block * size)
    k_plane = halves[:, :, 0].unflatten(-1, (size, block))
    v_plane = halves[:, :, 1].unflatten(-1, (block, size))
    scale = quant[:, None] if per_head else quant
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        b, o = divmod(slot, block)
        for plane, x, s in (
            (k_plane[b, :, :, o], key, scale),
            (v_plane[b, :, o], value, scale * 2),
        ):
            expected = device_numbers.cast(x[token], s.numpy(), "gaudi2")
            np.testing.assert_array_equal(plane.numpy(), expected)
    assert cache.count_nonzero() <= (tokens - 1) * heads * 2 * size
