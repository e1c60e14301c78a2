# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Prefill through the fused kernels, called as the HPU worker calls its own module."""

import pytest
import torch
import torch.nn.functional as F

from tests.device_numbers import MAXIMUM
from tests.hpu.scenes import format_of, relative_error, scales, static
from vllm.fp8_inc.attention import hpu_prompt
from vllm.fp8_inc.attention.hpu_prompt import PromptAttention

HEADS, KV_HEADS, QUERIES, KEYS, DIM = 4, 2, 24, 40, 64
SCALE = 0.09
AMPLITUDE = {"q": 1.0, "k": 3.0, "v": 11.0}
# q, k, v and P have 3 bits of mantissa: 2.6 % each for v and P, and logits of
# deviation 2.2 whose noise is 3.7 % of them.
BOUND = {"fp8": 0.075, "bf16": 0.01}


def qkv():
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "q": (2, HEADS, QUERIES, DIM),
        "k": (2, KV_HEADS, KEYS, DIM),
        "v": (2, KV_HEADS, KEYS, DIM),
    }
    return [
        (torch.randn(shape, generator=generator) * AMPLITUDE[role]).bfloat16()
        for role, shape in shapes.items()
    ]


def reference(q, k, v, mask):
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask, scale=SCALE
    )


def module(device, matmul="fp8", factors=(1, 1, 1), prob=None, per_head=False):
    prompt = PromptAttention(format_of(device), matmul)
    amax = {
        role: 4.5 * size * factor / MAXIMUM[device]
        for (role, size), factor in zip(AMPLITUDE.items(), factors)
    }
    heads = KV_HEADS if per_head else None
    each = {role: [s] * heads if heads else s for role, s in amax.items()}
    layer = scales(each["k"], each["v"], each["q"], prob)
    prompt.load_scales(layer, q=layer.q, k=layer.k, v=layer.v)
    return prompt


def attend(prompt, q, k, v, mask=None, causal=True, valid=None, **rest):
    return prompt(
        q, k, v, mask, 0.0, causal, SCALE, "fast", True, valid, "right", **rest
    )


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize("matmul", BOUND)
@pytest.mark.parametrize("masked", ["causal", "bias", "valid"])
def test_prefill_of_gqa(device, matmul, masked):
    q, k, v = qkv()
    seen = causal(QUERIES, KEYS)
    mask, valid = None, None
    if masked == "bias":  # with context, the worker gives both; the bias counts
        seen = seen & (torch.arange(KEYS) != 3)
        mask = torch.zeros(2, 1, QUERIES, KEYS).bfloat16().masked_fill(~seen, -1e9)
        valid = torch.tensor([QUERIES, QUERIES])
    if masked == "valid":
        valid = torch.tensor([KEYS, 30])
        seen = seen & (torch.arange(KEYS) < valid[:, None, None, None])
    out = attend(module(device, matmul), q, k, v, mask, valid=valid)
    expected = reference(q, k, v, seen)
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    assert relative_error(out, expected) < BOUND[matmul]


@pytest.mark.parametrize("role", [0, 1, 2])
def test_each_static_scale_acts_on_its_role(device, role):
    """Eight times too small a scale clips its role, and only the bound notices."""
    q, k, v = qkv()
    factors = [1.0, 1.0, 1.0]
    factors[role] = 1 / 8
    out = attend(module(device, factors=factors), q, k, v)
    assert relative_error(out, reference(q, k, v, causal(QUERIES, KEYS))) > 0.15


def test_a_scale_per_head_is_measured_instead(device):
    q, k, v = qkv()
    prompt = module(device, factors=(1 / 8,) * 3, per_head=True)
    assert not prompt.scales
    out = attend(prompt, q, k, v)
    assert relative_error(out, reference(q, k, v, causal(QUERIES, KEYS))) < BOUND["fp8"]


def test_reloaded_scales_act_and_absent_ones_are_measured(device):
    prompt = module(device, factors=(1 / 8,) * 3)
    layer = scales(0.1)
    held = prompt.scales["q"].quant_scale
    prompt.load_scales(layer, q=static(4.5 / MAXIMUM[device]), k=None, v=None)
    assert list(prompt.scales) == ["q"] and prompt.scales["q"].quant_scale is held
    q, k, v = qkv()
    out = attend(prompt, q, k, v)
    assert relative_error(out, reference(q, k, v, causal(QUERIES, KEYS))) < BOUND["fp8"]


def test_a_sliding_window(device):
    q, k, v = qkv()
    out = attend(module(device), q, k, v, window_size=(8, 0))
    ids = torch.arange(KEYS)
    positions = ids[KEYS - QUERIES :, None]
    seen = (ids <= positions) & (ids >= positions - 8)
    assert relative_error(out, reference(q, k, v, seen)) < BOUND["fp8"]
    with pytest.raises(NotImplementedError, match="no window_size"):
        attend(module(device, "bf16"), q, k, v, window_size=(8, 0))


def test_sinks_are_refused(device):
    with pytest.raises(NotImplementedError, match="sinks.*auto"):
        attend(module(device), *qkv(), sinks=torch.ones(HEADS))


def test_both_arities_of_the_kernel(device, monkeypatch):
    """On gaudi-pytorch-bridge 1.19 nothing is appended."""
    q, k, v = qkv()
    newer = attend(module(device), q, k, v)
    given = []

    def older(kernel, known, window):
        given.append(known)
        return []

    monkeypatch.setattr(hpu_prompt, "_appended", older)
    assert torch.equal(attend(module(device), q, k, v), newer)
    assert given == [19]


@pytest.mark.parametrize("prob, error", [(1.0, 0.1), (None, 0.06)])
def test_small_probabilities_are_kept(device, prob, error):
    """One large logit and many small ones, which together weigh as much."""
    keys = 2048
    q = torch.full((1, 1, 1, DIM), 1.0).bfloat16()
    k = torch.zeros(1, 1, keys, DIM).bfloat16()
    k[..., 0, :] = 7.5 / DIM / SCALE  # e^7.5 = 1808
    v = torch.linspace(0.5, 1.5, keys).view(1, 1, keys, 1).expand(-1, -1, -1, DIM)
    v = v.contiguous().bfloat16()
    v[..., 0, :] = -1
    prompt = PromptAttention(format_of(device))
    layer = scales(1 / MAXIMUM[device], prob=prob)
    prompt.load_scales(layer, q=None, k=None, v=None)
    out = attend(prompt, q, k, v, causal=False)
    expected = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), scale=SCALE
    )
    distance = (out.float() - expected).abs().max().item()
    assert (distance < error) == (prob is None)
