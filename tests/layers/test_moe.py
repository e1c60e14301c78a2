# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8-static experts against a loop over tokens in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import device_numbers
from tests.layers.moe_oracle import (
    ACTIVATIONS,
    EXPERTS,
    HIDDEN,
    NAME,
    Experts,
    grouped_top_k,
    moe_method,
)
from vllm.fp8_inc.layers.experts import ACTIVATIONS as SERVED

TOKENS, TOP_K = 7, 2
STRATEGIES = pytest.mark.parametrize("strategy", ["tensor", "channel"])
DEVICES = pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
MADE_FOR = pytest.mark.parametrize("made_for", ["gaudi2", "gaudi3"])


def run(layer, x, weights, ids, on_input=False):
    return torch.ops.vllm.fp8_experts(
        x,
        weights,
        ids,
        layer.w13_weight,
        layer.w13_weight_scale,
        layer.w13_input_quant_scale,
        layer.w2_weight,
        layer.w2_weight_scale,
        layer.w2_input_quant_scale,
        layer.kind,
        on_input,
        layer.served_on,
    )


def inputs():
    """Activations, some beyond amax, and two different experts for each token."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(TOKENS, HIDDEN, generator=generator) * 4).bfloat16()
    weights = torch.rand(TOKENS, TOP_K, generator=generator) + 0.1
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K)[1].int()
    return x, weights, ids


def assert_close(out, expected):
    assert out.dtype == torch.bfloat16
    atol = 2**-8 * expected.abs().max().item()
    np.testing.assert_allclose(
        out.double().numpy(), expected.numpy(), rtol=2**-8, atol=atol
    )


@STRATEGIES
@DEVICES
@MADE_FOR
def test_every_projection_of_every_expert_uses_its_own_scale(
    fp8_weight, strategy, device, made_for
):
    experts = Experts(fp8_weight, strategy, made_for)
    layer, (x, weights, ids) = experts.load(device), inputs()
    expected = experts.expected(layer, x, weights, ids)
    assert_close(run(layer, x, weights, ids), expected)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_the_activation_of_the_model_is_used(fp8_weight, activation):
    experts = Experts(fp8_weight)
    layer, (x, weights, ids) = experts.load(activation=activation), inputs()
    expected = experts.expected(layer, x, weights, ids)
    assert_close(run(layer, x, weights, ids), expected)


def test_activations_are_their_formulas():
    """An FP8 product would hide how the two gelus differ."""
    values = torch.linspace(-4, 4, 33, dtype=torch.float64)
    cubic = math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)
    formulas = {
        "silu": values / (1 + torch.exp(-values)),
        "gelu": values / 2 * (1 + torch.erf(values / math.sqrt(2))),
        "gelu_tanh": values / 2 * (1 + torch.tanh(cubic)),
    }
    assert formulas.keys() == SERVED.keys()
    for name, expected in formulas.items():
        torch.testing.assert_close(SERVED[name](values), expected, rtol=0, atol=1e-9)


def test_router_weights_may_multiply_the_input(fp8_weight):
    experts = Experts(fp8_weight)
    layer, (x, weights, ids) = experts.load(), inputs()
    expected = experts.expected(layer, x, weights, ids, on_input=True)
    assert_close(run(layer, x, weights, ids, on_input=True), expected)
    assert not torch.allclose(expected, experts.expected(layer, x, weights, ids))


def test_experts_elsewhere_add_nothing(fp8_weight):
    experts = Experts(fp8_weight)
    layer, (x, weights, ids) = experts.load(), inputs()
    ids[0, 0] = ids[3, 1] = -1
    ids[5] = -1
    out = run(layer, x, weights, ids)
    assert_close(out, experts.expected(layer, x, weights, ids))
    assert out[5].count_nonzero() == 0
    assert run(layer, x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)


@STRATEGIES
def test_weights_above_240_are_halved_on_gaudi2(fp8_weight, strategy):
    experts = Experts(fp8_weight, strategy)
    before, after = experts.load("gaudi3"), experts.load("gaudi2")
    for name in ("w13", "w2"):
        codes = device_numbers.to_numpy(getattr(before, f"{name}_weight"))
        assert (codes & 0x7F).max() > 0x77
        halves = device_numbers.decode(codes, "gaudi3") / 2
        expected = device_numbers.encode(halves, "gaudi2")
        got = device_numbers.to_numpy(getattr(after, f"{name}_weight"))
        np.testing.assert_array_equal(got, expected)
        scale = getattr(before, f"{name}_weight_scale")
        assert torch.equal(getattr(after, f"{name}_weight_scale"), 2 * scale)


@STRATEGIES
@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("kind", ["weight_scale", "input_scale"])
@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf])
def test_a_missing_or_impossible_scale_is_an_error_that_names_layer_and_key(
    fp8_weight, strategy, name, kind, value
):
    with pytest.raises(ValueError) as error:
        Experts(fp8_weight, strategy).load(**{f"{name}_{kind}": value})
    assert f"{NAME}.{name}" in str(error.value)
    assert kind in str(error.value)
    assert f"{math.nan if value is None else value:g}" in str(error.value)


@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan])
@pytest.mark.parametrize("order", [0, 1], ids=["gate", "up"])
def test_a_good_scale_beside_it_does_not_hide_an_impossible_one(
    fp8_weight, value, order
):
    pair = [0.02, 0.02]
    pair[order] = value
    with pytest.raises(ValueError, match=NAME):
        Experts(fp8_weight).load(w13_input_scale=pair)


@pytest.mark.parametrize("activation", ["swigluoai", "relu2", "silu_no_mul"])
def test_another_activation_is_an_error_that_names_layer_and_value(activation):
    with pytest.raises(ValueError, match=f"{NAME}.*{activation.upper()}"):
        moe_method("tensor", "gaudi3", "gaudi3", activation)


@pytest.mark.parametrize("setting", [{"swiglu_limit": 7.0}, {"has_bias": True}])
def test_what_the_experts_do_not_compute_is_an_error(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{NAME}.*{name} {value}"):
        moe_method("tensor", "gaudi3", "gaudi3", **setting)


def routed(layer, x, logits, **settings):
    """Runs the layer as vLLM does, with the attributes of its RoutedExperts."""
    defaults = {
        "top_k": TOP_K,
        "use_grouped_topk": False,
        "renormalize": False,
        "topk_group": None,
        "num_expert_group": None,
        "custom_routing_function": None,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "e_score_correction_bias": None,
        "expert_map": None,
        "activation": SimpleNamespace(value=layer.kind),
        "apply_router_weight_on_input": False,
    }
    for name, value in (defaults | settings).items():
        setattr(layer, name, value)
    return layer.method.apply_monolithic(layer, x, logits)


def test_the_layer_routes_itself():
    assert moe_method("tensor", "gaudi3", "gaudi3").is_monolithic


def test_grouped_top_k_with_a_correction_bias_reaches_the_experts(fp8_weight):
    experts = Experts(fp8_weight)
    layer, (x, _, _) = experts.load(), inputs()
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator) * 3
    bias = torch.tensor([0.4, -0.2, 0.3, 0.1])
    chosen = grouped_top_k(logits, bias, 2, 1, TOP_K, 2.5)
    assert {frozenset(row) for row in chosen} == {frozenset({0, 1}), frozenset({2, 3})}
    out = routed(
        layer,
        x,
        logits,
        use_grouped_topk=True,
        renormalize=True,
        topk_group=1,
        num_expert_group=2,
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        e_score_correction_bias=bias,
    )
    ids = torch.tensor([list(row) for row in chosen])
    weights = torch.tensor([list(row.values()) for row in chosen])
    assert_close(out, experts.expected(layer, x, weights, ids))


@pytest.mark.parametrize("on_input", [False, True])
def test_a_custom_routing_function_reaches_the_experts(fp8_weight, on_input):
    experts = Experts(fp8_weight)
    layer, (x, weights, ids) = experts.load(), inputs()
    out = routed(
        layer,
        x,
        torch.zeros(TOKENS, EXPERTS),
        custom_routing_function=lambda **_: (weights, ids),
        apply_router_weight_on_input=on_input,
    )
    assert_close(out, experts.expected(layer, x, weights, ids, on_input))


def test_under_expert_parallelism_ids_are_mapped_to_the_experts_here(fp8_weight):
    experts = Experts(fp8_weight)
    layer, (x, weights, ids) = experts.load(), inputs()
    # Of six experts four are here, in another order.
    here = torch.tensor([-1, 2, 0, 3, -1, 1], dtype=torch.int32)
    ids = (ids + 1).int()
    out = routed(
        layer,
        x,
        torch.zeros(TOKENS, 6),
        custom_routing_function=lambda **_: (weights, ids),
        expert_map=here,
    )
    assert (here[ids.long()] < 0).any()
    assert_close(out, experts.expected(layer, x, weights, here[ids.long()]))
