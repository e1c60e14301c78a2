# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The decode kernel of MHA and GQA against float64, on shapes by hypothesis."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import device_numbers
from tests.attention.test_kernels import relative_error
from vllm.fp8_inc.attention.kernels import gqa
from vllm.fp8_inc.attention.kernels.gqa import decode_heads
from vllm.fp8_inc.formats import FORMATS, GAUDI3


@st.composite
def head_shapes(draw):
    kv_heads = draw(st.integers(1, 3))
    return {
        "device": draw(st.sampled_from(list(FORMATS))),
        "lengths": draw(st.lists(st.integers(1, 400), min_size=1, max_size=4)),
        "kv_heads": kv_heads,
        "queries": draw(st.integers(1, 9)),
        "size": 16 * draw(st.integers(1, 9)),
        "block": 16 * draw(st.integers(1, 8)),
        "window": draw(st.sampled_from([None, 1, 50, 200])),
        "largest_logit": draw(st.sampled_from([0.1, 5.0, 35.0])),
        "scales": draw(
            st.lists(
                st.sampled_from([2.0**-20, 0.013, 1.0, 37.0]),
                min_size=2 * kv_heads,
                max_size=2 * kv_heads,
            )
        ),
        "per_head": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def compare_heads(shape, dtype=torch.float32):
    """The error of a decode of random codes, against float64 written out."""
    generator = torch.Generator().manual_seed(shape["seed"])
    lengths, kv_heads, size = shape["lengths"], shape["kv_heads"], shape["size"]
    fmt, block = FORMATS[shape["device"]], shape["block"]
    most = -(-max(lengths) // block)
    blocks = most * len(lengths) + 2
    order = torch.randperm(blocks, generator=generator)[: most * len(lengths)]
    table = order.view(len(lengths), most).int()
    cache = torch.randint(256, (blocks, kv_heads, block, 2 * size), generator=generator)
    cache = torch.where(cache % 128 > fmt.max_code, cache - 16, cache).to(torch.uint8)
    heads = kv_heads * shape["queries"]
    query = torch.randn(len(lengths), heads, size, generator=generator).to(dtype)
    scales = torch.tensor(shape["scales"]).view(2, kv_heads)
    if not shape["per_head"]:
        scales = scales[:, :1].expand(-1, kv_heads)
    values = torch.from_numpy(device_numbers.decode(cache.numpy(), fmt.name))
    halves = values.double().view(blocks, kv_heads, 2, block * size)
    keys = halves[:, :, 0].unflatten(-1, (size, block)).mT * scales[0, :, None, None]
    v = halves[:, :, 1].unflatten(-1, (block, size)) * scales[1, :, None, None]

    def rows(x, sequence):
        x = x[table[sequence].long()].transpose(0, 1).flatten(1, 2)
        stop = lengths[sequence]
        x = x[:, max(0, stop - (shape["window"] or stop)) : stop]
        return x.repeat_interleave(shape["queries"], dim=0)

    logits = [
        (rows(keys, i) @ q.double()[..., None]).squeeze(-1) for i, q in enumerate(query)
    ]
    largest = max(x.abs().max().item() for x in logits)
    scale = shape["largest_logit"] / largest
    expected = torch.stack(
        [
            ((x * scale).softmax(-1)[:, None] @ rows(v, i)).squeeze(1)
            for i, x in enumerate(logits)
        ]
    )
    k_scale, v_scale = scales if shape["per_head"] else scales[:, 0]
    out = decode_heads(
        query,
        cache,
        table,
        torch.tensor(lengths),
        scale,
        k_scale.contiguous(),
        v_scale.contiguous(),
        fmt,
        shape["window"],
    )
    assert out.dtype == dtype
    return relative_error(out.double(), expected)


@settings(max_examples=40, deadline=None)
@given(head_shapes())
def test_decode_of_heads_of_any_shape(shape):
    assert compare_heads(shape) < 1e-5


@settings(max_examples=10, deadline=None)
@given(head_shapes(), st.integers(2, 3), st.lists(st.integers(900, 1500), max_size=2))
def test_pieces_of_long_sequences_of_heads_are_joined(shape, threads, long):
    shape["lengths"] = shape["lengths"] + long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gqa, "threads_for", lambda operations: threads)
        patch.setattr(gqa, "_SHORTEST_PIECE", 48)
        assert compare_heads(shape) < 1e-5


def test_codes_behind_the_last_token_are_not_seen():
    """A block may hold NaN from a request before."""
    cache = torch.full((1, 1, 32, 32), 0x7F, dtype=torch.uint8)
    k_plane, v_plane = cache.view(2, 16, 32)[0], cache.view(2, 32, 16)[1]
    k_plane[:, :5] = v_plane[:5] = 0x38
    query, one = torch.ones(1, 1, 16), torch.ones(())
    table, lengths = torch.zeros(1, 1).int(), torch.tensor([5])
    out = decode_heads(query, cache, table, lengths, 1.0, one, one, GAUDI3)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_of_heads_rounds_nothing_but_the_result(dtype):
    shape = {
        "device": "gaudi2",
        "lengths": [1, 700, 33],
        "kv_heads": 2,
        "queries": 4,
        "size": 128,
        "block": 32,
        "window": None,
        "largest_logit": 35.0,
        "scales": [0.013, 0.02, 0.03, 0.04],
        "per_head": True,
        "seed": 1,
    }
    assert compare_heads(shape, dtype) < 2.5e-3
