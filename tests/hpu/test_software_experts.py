# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""hpu.mixture_of_experts and block_softmax_adjustment against float32 formulas."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.device_numbers import MAXIMUM

FP8 = torch.float8_e4m3fn
TOKENS, HIDDEN, WIDTH, EXPERTS, FIRST = 6, 16, 8, 3, 2


@pytest.fixture
def soft(monkeypatch, device):
    """The modules of the software Gaudi that put nothing into PyTorch."""
    folder = Path(__file__).resolve().parents[2] / "software_gaudi"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("SOFT_GAUDI", device)
    from soft_gaudi import blocks, experts

    return blocks, experts


def operands(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    ids = torch.stack([torch.randperm(EXPERTS + 2)[:2] for _ in range(TOKENS)]) + FIRST
    weights = torch.rand(TOKENS, 2, generator=generator)
    w12 = [normal(2 * WIDTH, HIDDEN) / 4 for _ in range(EXPERTS)]
    w3 = [normal(HIDDEN, WIDTH) / 3 for _ in range(EXPERTS)]
    return normal(TOKENS, HIDDEN), ids, weights, w12, w3


def expected(x, ids, weights, w12, w3):
    """The sum over those of a token's experts that are ours."""
    out = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for expert, weight in zip(ids[token].tolist(), weights[token]):
            n = expert - FIRST
            if n < EXPERTS:
                gate, up = (w12[n] @ x[token]).chunk(2)
                out[token] += weight * (w3[n] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("permuted", [True, False])
def test_unquantised_experts(soft, permuted):
    _, experts = soft
    x, ids, weights, w12, w3 = operands()
    given = [w if permuted else w.t().contiguous() for w in w12 + w3]
    ours = experts.unquantised(
        x, ids, weights, given[:EXPERTS], given[EXPERTS:], permuted, "silu", FIRST, 4
    )
    torch.testing.assert_close(ours, expected(x, ids, weights, w12, w3))


@pytest.mark.parametrize("static", [True, False])
def test_fp8_experts_with_a_scale_a_row(soft, device, static):
    _, experts = soft
    x, ids, weights, w12, w3 = operands(1)
    top = MAXIMUM[device]

    def cast(values, scale):
        return (values / scale).clamp(-top, top).to(FP8)

    scales = [w.abs().amax(1, keepdim=True) / top for w in w12 + w3]
    codes = [cast(w, scale) for w, scale in zip(w12 + w3, scales)]
    x_scale = x.abs().max() / top
    x_codes = cast(x, x_scale)
    more = {"d_scale_intermediate_hidden_states": [torch.tensor(6 / top)] * EXPERTS}
    ours = (experts.static_fp8 if static else experts.dynamic_fp8)(
        x_codes,
        ids,
        weights,
        codes[:EXPERTS],
        codes[EXPERTS:],
        d_scale_hidden_states=x_scale,
        d_scale_w12=scales[:EXPERTS],
        d_scale_w3=scales[EXPERTS:],
        permuted_weights=True,
        activation="silu",
        experts_min=FIRST,
        experts_max=4,
        **(more if static else {}),
    )
    back = [code.float() * scale for code, scale in zip(codes, scales)]
    wanted = expected(
        x_codes.float() * x_scale, ids, weights, back[:EXPERTS], back[EXPERTS:]
    )
    error = (ours.float() - wanted).norm() / wanted.norm()
    assert ours.dtype == torch.bfloat16
    assert 0 < error < 0.05  # the intermediate is rounded to FP8


def test_scales_as_numbers_are_those_scales(soft):
    """By position, as the worker's module for INC calls it."""
    _, experts = soft
    x, ids, weights, w12, w3 = operands(3)
    codes = [[w.to(FP8) for w in each] for each in (w12, w3)]
    given = (x.to(FP8), ids, weights, *codes)
    scales = [0.5, [0.1, 0.2, 0.3], [1.1, 1.2, 1.3], [0.7, 0.8, 0.9]]
    names = ("hidden_states", "intermediate_hidden_states", "w12", "w3")
    as_tensors = {
        f"d_scale_{name}": scale
        for name, scale in zip(names, map(torch.tensor, scales))
    }
    switches = {"permuted_weights": True, "activation": "silu", "experts_min": FIRST}
    expected = experts.static_fp8(*given, **as_tensors, **switches, experts_max=4)
    ours = experts.scalar_fp8(*given, *scales, *switches.values(), 4, 0, 0)
    assert torch.equal(ours, expected) and ours.count_nonzero() > 0


def test_the_largest_intermediate_of_each_expert_is_measured(soft):
    _, experts = soft
    x, ids, weights, w12, w3 = operands(2)
    ids[:, 0] = FIRST + 1  # every token goes there
    ids[:, 1] = FIRST + EXPERTS  # not ours
    _, amax = experts.measured(x, ids, weights, w12, w3, True, "silu", FIRST, 4)
    gate, up = (x @ w12[1].t()).chunk(2, -1)
    largest = (F.silu(gate) * up).abs().max()
    assert amax.tolist() == pytest.approx([0, largest.item(), 0])


def test_blocks_join_to_the_softmax_of_a_sequence(soft):
    blocks, _ = soft
    scores = torch.randn(3, 4) * 3  # a sequence of two blocks, and one of one
    maximum = scores.amax(-1, keepdim=True)
    own = (scores - maximum).exp()
    padding = torch.zeros(1, 1)
    factor = blocks.adjustment(
        torch.cat((maximum, padding)),
        torch.cat((own.sum(-1, keepdim=True), padding)),
        torch.tensor([0, 0, 1, -1]),
        2,
        [4, 1],
    )
    ours = own * factor[:3]
    torch.testing.assert_close(ours[:2].flatten(), scores[:2].flatten().softmax(0))
    torch.testing.assert_close(ours[2], scores[2].softmax(0))


def test_a_block_of_masked_scores_weighs_nothing(soft):
    blocks, _ = soft
    factor = blocks.adjustment(
        torch.tensor([[0.5], [-torch.inf]]),
        torch.tensor([[2.0], [0.0]]),
        torch.tensor([0, 0]),
        1,
        [2, 1],
    )
    assert factor.flatten().tolist() == [0.5, 0]
