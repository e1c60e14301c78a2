# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Decode over FP8 blocks against float32 attention over the dequantised cache."""

import math

import pytest
import torch

from tests.device_numbers import MAXIMUM
from tests.hpu.scenes import (
    attention,
    batch_of,
    cached_values,
    empty_cache,
    format_of,
    on_grid,
    random,
    relative_error,
    scales,
    static,
)
from vllm.fp8_inc.attention.hpu_decode import block_weights
from vllm.fp8_inc.attention.mha_hpu import MHAPieces
from vllm.fp8_inc.attention.mla_hpu import MLAPieces

LATENT, ROPE, HEADS = 512, 64, 4
LENGTHS = [300, 1, 128, 517]
SCALE = 192**-0.5
# Against the q that was cast. P has 3 bits of mantissa, 2.6 % in the norm; in bf16 the
# logits are rounded to 2^-9 of their size, which is that of a bf16 cache too.
BOUND = {"fp8": 0.035, "bf16": 0.012}


def mla(device, contiguous, matmul="fp8", layer_scales=None, lengths=LENGTHS):
    """Pieces, batch, a written latent cache, and float32 K of each sequence."""
    pieces = MLAPieces(format_of(device), contiguous, matmul)
    pieces.load_scales(layer_scales or scales(5 / MAXIMUM[device]))
    batch = batch_of(lengths, contiguous)
    cache = empty_cache(batch, LATENT + ROPE)
    latent = random(len(batch.slots), LATENT + ROPE, seed=1)
    pieces.latent_cache(latent, cache, batch.slots)
    stored = cached_values(
        batch, cache, pieces.latent_cache.scale.dequant_scale, device
    )
    return pieces, batch, cache, [rows[:, None] for rows in stored]


def decode_mla(pieces, query, cache, batch):
    return pieces.decode.forward_decode(
        query=query,
        key_cache=cache.unsqueeze(1),
        value_cache=None,
        scale=SCALE,
        kv_lora_rank=LATENT,
        **batch.decode_arguments(),
    )


@pytest.mark.parametrize("matmul", BOUND)
@pytest.mark.parametrize("contiguous", [False, True])
def test_mla(device, contiguous, matmul):
    pieces, batch, cache, keys = mla(device, contiguous, matmul)
    query = random(len(LENGTHS), HEADS, LATENT + ROPE, seed=2)
    out = decode_mla(pieces, query, cache, batch)
    seen = on_grid(query, device) if matmul == "fp8" else query
    expected = attention(seen, keys, [k[..., :LATENT] for k in keys], SCALE)
    assert out.dtype == torch.bfloat16 and out.shape == (4, HEADS, LATENT)
    for row, other in zip(out, expected, strict=True):
        assert relative_error(row, other) < BOUND[matmul]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("kind", ["tensor", "head"])
@pytest.mark.parametrize("matmul", BOUND)
@pytest.mark.parametrize("contiguous", [False, True])
def test_mha_and_gqa(device, contiguous, matmul, kind, heads, kv_heads):
    """Heads of unequal size, so that a scale of the wrong head or role shows."""
    size, maximum = 64, MAXIMUM[device]
    spread = 2.0 ** torch.arange(kv_heads)
    k_scale, v_scale = 5 / maximum * spread, 12 / maximum * spread.flip(0)
    if kind == "tensor":
        k_scale, v_scale = k_scale.max(), v_scale.max()
    q_scale = [5 / maximum] * heads if kind == "head" else 5 / maximum
    pieces = MHAPieces(format_of(device), contiguous, matmul)
    pieces.load_scales(scales(k_scale.tolist(), v_scale.tolist(), q_scale))
    batch = batch_of(LENGTHS, contiguous)
    k_cache, v_cache = (empty_cache(batch, kv_heads, size) for _ in range(2))
    written = len(batch.slots), kv_heads, size
    key = random(*written, seed=1) * spread[:, None]
    value = random(*written, seed=3) * 2.4 * spread.flip(0)[:, None]
    pieces.k_cache(key.bfloat16(), k_cache, batch.slots, scales=None, is_prompt=True)
    pieces.v_cache(value.bfloat16(), v_cache, batch.slots, scales=None, is_prompt=True)
    query = random(len(LENGTHS), 1, heads * size, seed=2)
    out = pieces.decode.forward_decode(
        query=query,
        key_cache=k_cache,
        value_cache=v_cache,
        scale=size**-0.5,
        k_scales=None,
        v_scales=None,
        sinks=None,
        position_bias=None,
        fsdpa_op=None,
        **batch.decode_arguments(),
    )
    stored = [
        cached_values(batch, cache, module.scale.dequant_scale, device)
        for cache, module in ((k_cache, pieces.k_cache), (v_cache, pieces.v_cache))
    ]
    seen = query.view(-1, heads, size)
    if matmul == "fp8":
        seen = on_grid(seen, device, pieces.decode.q_scale.dequant_scale)
    expected = attention(seen, *stored, size**-0.5)
    for head in range(heads):
        assert relative_error(out[:, head], expected[:, head]) < BOUND[matmul]


def test_the_q_of_the_decode_has_its_own_scale(device):
    """Static and right it is as good as rows by their amax; wrong it is not."""
    pieces, batch, cache, keys = mla(device, False)
    query = random(len(LENGTHS), HEADS, LATENT + ROPE, seed=2)
    expected = attention(query, keys, [k[..., :LATENT] for k in keys], SCALE)
    errors = {}
    for amax in (None, 5.0, 0.7):
        q = None if amax is None else static(amax / MAXIMUM[device])
        pieces.decode.load_scales(scales(5 / MAXIMUM[device]), q)
        out = decode_mla(pieces, query, cache, batch)
        errors[amax] = relative_error(out, expected)
    assert errors[None] < 0.06 and errors[5.0] < 0.06
    assert errors[0.7] > 0.2  # clips


def test_q_of_the_prefill_does_not_reach_the_decode(device):
    pieces = MLAPieces(format_of(device), False)
    layer = scales(0.1, q=0.2)
    pieces.load_scales(layer)
    assert pieces.decode.q_scale is None
    object.__setattr__(layer, "q_latent", static(0.3))
    pieces.load_scales(layer)
    assert pieces.decode.q_scale.dequant_scale == static(0.3).dequant_scale
    assert pieces.prompt.scales["q"].dequant_scale == static(0.2).dequant_scale
    assert list(pieces.prompt.scales) == ["q"]


@pytest.mark.parametrize("blocks", [16, 64])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_many_blocks(device, blocks, spread):
    """Uniform scores are what saturates the worker's FP8 sums over blocks."""
    pieces, batch, cache, keys = mla(device, False, lengths=[blocks * 128, 40])
    query = random(2, HEADS, LATENT + ROPE, seed=2) * spread
    out = decode_mla(pieces, query, cache, batch)
    seen = on_grid(query, device)
    expected = attention(seen, keys, [k[..., :LATENT] for k in keys], SCALE)
    assert relative_error(out, expected) < 0.035
    if spread == 0:
        plain = attention(query, keys, [k[..., :LATENT] for k in keys], SCALE)
        assert relative_error(out, plain) < 0.01


def test_padding_cannot_spoil_the_batch(device):
    """Stale blocks of any magnitude, and groups of -1 or batch, change nothing."""
    pieces, batch, cache, _ = mla(device, True)
    query = random(len(LENGTHS), HEADS, LATENT + ROPE, seed=2)
    out = decode_mla(pieces, query, cache, batch)
    padding = batch.block_groups < 0
    assert padding.sum() >= 2
    rows = cache.view(torch.uint8).view(-1, 128, LATENT + ROPE)
    rows[padding] = torch.tensor([0x77, 0xF7], dtype=torch.uint8)[
        torch.arange(int(padding.sum())) % 2, None, None
    ]
    batch.block_groups[padding] = len(LENGTHS)
    again = decode_mla(pieces, query, cache, batch)
    assert torch.isfinite(again).all() and torch.equal(out, again)


def test_block_weights_are_the_softmax_over_a_sequence():
    logits = random(6, 3, 7, seed=4).float() * 30
    groups = torch.tensor([0, 0, 1, 2, 0, 2])  # 2: padding
    logits[5] -= 500  # whose weight underflows beside the other padding
    rows = [[1, 0], [1, 0], [0, 1], [0, 0], [1, 0], [0, 0]]
    mapping = torch.tensor(rows).bfloat16()
    maximum = logits.amax(-1)
    sums = (logits - maximum[..., None]).exp().sum(-1)
    weights = block_weights(maximum, sums, mapping, groups)
    for sequence in (0, 1):
        mine = logits[groups == sequence]
        largest = mine.amax((0, 2))
        total = (mine - largest[:, None]).exp().sum((0, 2))
        expected = (maximum[groups == sequence] - largest).exp() / total
        torch.testing.assert_close(weights[groups == sequence], expected)
    assert torch.isfinite(weights).all()


def test_a_block_that_is_all_hidden_is_nothing(device):
    pieces, batch, cache, keys = mla(device, False, lengths=[256])
    batch.block_bias[1] = -math.inf
    query = random(1, HEADS, LATENT + ROPE, seed=2)
    out = decode_mla(pieces, query, cache, batch)
    keys = [k[:128] for k in keys]
    expected = attention(query, keys, [k[..., :LATENT] for k in keys], SCALE)
    assert relative_error(out, expected) < 0.05


@pytest.mark.parametrize("name", ["sinks", "position_bias", "k_scales", "v_scales"])
def test_what_is_not_supported_is_refused(device, name):
    pieces = MLAPieces(format_of(device), False)
    with pytest.raises(NotImplementedError, match=f"{name}.*kv-cache-dtype auto"):
        pieces.decode.forward_decode(**{name: torch.ones(1)})


def test_scales_that_were_never_loaded_give_nan(device):
    pieces = MLAPieces(format_of(device), False)
    batch = batch_of([3], False)
    cache = empty_cache(batch, LATENT + ROPE)
    out = decode_mla(pieces, random(1, HEADS, LATENT + ROPE), cache, batch)
    assert out.isnan().all()


def test_traced_by_torch_compile(device):
    """One graph, and reloaded scales act without another."""
    pieces, batch, cache, keys = mla(device, False)
    query = random(len(LENGTHS), HEADS, LATENT + ROPE, seed=2)
    arguments = {"scale": SCALE, "kv_lora_rank": LATENT, **batch.decode_arguments()}
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(pieces.decode, backend=backend, fullgraph=True)
    for factor in (1, 2):
        pieces.load_scales(scales(5 * factor / MAXIMUM[device]))
        eager = pieces.decode(query, cache[:, None], None, **arguments)
        traced = compiled(query, cache[:, None], None, **arguments)
        assert torch.equal(eager, traced)
    assert len(graphs) == 1
