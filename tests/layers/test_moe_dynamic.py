# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Experts with dynamic activations and with block weights, token by token."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import device_numbers
from tests.layers.test_blocks import checkpoint, expected_weight
from tests.layers.test_moe import assert_close, run
from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.layers.moe import Fp8MoEMethod
from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

NAME = "model.layers.2.mlp.experts"
EXPERTS, HIDDEN, WIDTH, TOKENS = 3, 200, 136, 4
DEVICES = pytest.mark.parametrize("device", list(FORMATS))


def method(weights, device, ranks=1):
    adjustment = Adjustment(FORMATS["gaudi3"], FORMATS[device], "as the test says")
    config = SimpleNamespace(
        activation=MoEActivation("silu"),
        in_dtype=torch.bfloat16,
        is_act_and_mul=True,
        swiglu_limit=None,
        has_bias=False,
        moe_parallel_config=SimpleNamespace(tp_size=ranks),
    )
    name = "weight_scale_inv" if weights == "block" else "weight_scale"
    recipe = Fp8Recipe(weights, False, adjustment, scale_name=name)
    return Fp8MoEMethod(recipe, SimpleNamespace(moe_config=config), NAME)


def scales_of(weights, blocks, rows):
    """Block scales, or their first column and element for the other kinds."""
    if weights == "block":
        return blocks
    if weights == "channel":
        return [
            s[:1, :1] * (1 + torch.arange(r)[:, None] % 5) for s, r in zip(blocks, rows)
        ]
    return [s[0, 0] for s in blocks]


def load(weights, device):
    """A loaded layer, and codes and float64 row scales of each expert."""
    served = method(weights, device)
    layer = torch.nn.Module()
    served.create_weights(
        layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16, weight_loader=None
    )
    experts = []
    key = served.recipe.scale_name
    for e in range(EXPERTS):
        pair = []
        for name, widths, inputs in (
            ("w13", [WIDTH, WIDTH], HIDDEN),
            ("w2", [HIDDEN], WIDTH),
        ):
            codes, blocks = checkpoint(widths, inputs)
            factor = 1 + e + (name == "w2") / 2
            scales = scales_of(weights, [s * factor for s in blocks], widths)
            getattr(layer, f"{name}_weight").data[e] = torch.cat(
                [c.view(torch.uint8) for c in codes]
            ).view(torch.float8_e4m3fn)
            target = getattr(layer, f"{name}_{key}").data[e]
            stack = torch.stack if weights == "tensor" else torch.cat
            target.copy_(stack(scales).view(target.shape))
            pair.append(expected(weights, codes, scales, device))
        experts.append(pair)
    served.process_weights_after_loading(layer)
    layer.kind, layer.served_on = "silu", device
    return layer, experts


def expected(weights, codes, scales, device):
    if weights == "block":
        values, rows = expected_weight(codes, scales, device)
        return device_numbers.decode(values, device) * rows[:, None]
    return np.concatenate(
        [
            device_numbers.decode(device_numbers.to_numpy(c), "gaudi3")
            * s.double().numpy()
            for c, s in zip(codes, scales, strict=True)
        ]
    )


def product(x, weight, device):
    """bf16 of x, quantised by its own amax, times the float64 weight."""
    values = device_numbers.to_numpy(x)
    kind = values.dtype.type
    amax = np.abs(values).max(-1, keepdims=True)
    scale = (amax + kind(1e-8)) / kind(device_numbers.MAXIMUM[device])
    codes = device_numbers.encode(values * (kind(1) / scale), device)
    out = device_numbers.decode(codes, device) @ weight.T * scale.astype(np.float64)
    return torch.from_numpy(out).bfloat16()


@DEVICES
@pytest.mark.parametrize("weights", ["tensor", "channel", "block"])
def test_experts_quantise_every_token_by_itself(weights, device):
    layer, experts = load(weights, device)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([0.0, 0.02, 1.0, 30.0])
    x = (torch.randn(TOKENS, HIDDEN, generator=generator) * sizes[:, None]).bfloat16()
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]], dtype=torch.int32)
    shares = torch.rand(TOKENS, 2, generator=generator) + 0.1
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for share, e in zip(shares[token].double(), ids[token].tolist(), strict=True):
            w13, w2 = experts[e]
            gate, up = product(x[token : token + 1], w13, device).double().chunk(2, -1)
            middle = (F.silu(gate) * up).bfloat16()
            out[token] += product(middle, w2, device)[0].double() * share
    got = run(layer, x, shares, ids)
    assert got[0].count_nonzero() == 0
    assert_close(got, out)


@pytest.mark.parametrize("weights", ["tensor", "channel", "block"])
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_a_missing_weight_scale_names_layer_and_key(weights, name):
    served, layer = method(weights, "gaudi3"), torch.nn.Module()
    served.create_weights(
        layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16, weight_loader=None
    )
    for part in ("w13", "w2"):
        getattr(layer, f"{part}_weight").data.view(torch.uint8).zero_()
        scale = getattr(layer, f"{part}_{served.recipe.scale_name}").data
        scale.fill_(0.5)
        if part == name:
            scale[1].view(-1)[-1] = math.nan
    key = served.recipe.scale_name
    with pytest.raises(ValueError, match=rf"{NAME}\.{name}\.{key} is nan: missing"):
        served.process_weights_after_loading(layer)


def test_ranks_that_cut_a_block_of_an_expert_are_refused():
    with pytest.raises(ValueError, match=rf"{NAME}: tensor parallelism over 2 ranks"):
        method("block", "gaudi3", ranks=2).create_weights(
            torch.nn.Module(), EXPERTS, HIDDEN, 96, torch.bfloat16, weight_loader=None
        )
