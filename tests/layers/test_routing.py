# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""One helper reads the result of every select_experts, of two values or of three."""

import pytest
import torch

from tests.layers.moe_oracle import grouped_top_k
from vllm.fp8_inc.layers.routing import select_experts
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

WEIGHTS = torch.tensor([[0.7, 0.2], [0.6, 0.1]])
IDS = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)


@pytest.mark.parametrize("rest", [(), (None,), (torch.zeros(2, 4),)])
@pytest.mark.parametrize("kind", [tuple, list])
def test_two_and_three_values_give_weights_and_ids(rest, kind):
    weights, ids = select_experts(lambda: kind((WEIGHTS, IDS, *rest)))
    assert weights is WEIGHTS
    assert ids is IDS


@pytest.mark.parametrize("values", [(), (WEIGHTS,), (WEIGHTS, IDS, None, None)])
def test_another_number_of_values_is_an_error_that_names_it(values):
    with pytest.raises(ValueError, match=f"returned {len(values)} values"):
        select_experts(lambda: values)


def test_the_arguments_reach_the_router_by_name():
    seen = {}

    def router(**kwargs):
        seen.update(kwargs)
        return WEIGHTS, IDS

    select_experts(router, hidden_states=WEIGHTS, top_k=2)
    assert seen == {"hidden_states": WEIGHTS, "top_k": 2}


def selected(weights, ids):
    """{id: weight} of each token: the order of the experts means nothing."""
    pairs = zip(ids.tolist(), weights.tolist(), strict=True)
    return [dict(zip(row, values, strict=True)) for row, values in pairs]


@pytest.mark.parametrize("third", [False, True])
def test_grouped_top_k_takes_the_group_by_bias_and_the_weight_without_it(third):
    logits = torch.tensor(
        [
            [2.0, 1.9, -3.0, 1.0, 0.9, 0.8],
            [-1.0, 0.5, 0.4, 0.3, -2.0, 0.2],
            [0.1, 3.0, 0.2, 2.9, 2.8, -5.0],
        ]
    )
    bias = torch.tensor([0.0, -0.3, 0.05, 0.35, 0.1, 0.0])

    def router(**kwargs):
        result = cpu_moe.select_experts(**kwargs)
        return (*result, None) if third else result

    def route(bias):
        weights, ids = select_experts(
            router,
            hidden_states=torch.zeros(3, 8),
            router_logits=logits,
            top_k=2,
            use_grouped_topk=True,
            renormalize=True,
            topk_group=1,
            num_expert_group=2,
            scoring_func="sigmoid",
            routed_scaling_factor=2.5,
            e_score_correction_bias=bias,
        )
        return selected(weights, ids)

    expected = grouped_top_k(logits, bias, 2, 1, 2, 2.5)
    assert route(bias) == [pytest.approx(row, rel=1e-5) for row in expected]
    unbiased = [set(row) for row in route(torch.zeros(6))]
    assert unbiased[0] == {0, 1}, "without the bias the first group wins"
    assert set(expected[0]) == {3, 4}, "with it the second"


@pytest.mark.parametrize("renormalize", [False, True])
def test_plain_top_k_is_a_softmax(renormalize):
    logits = torch.tensor([[0.1, 2.0, -1.0, 1.5], [3.0, 0.0, 2.0, -2.0]])
    weights, ids = select_experts(
        cpu_moe.select_experts,
        hidden_states=torch.zeros(2, 8),
        router_logits=logits,
        top_k=2,
        use_grouped_topk=False,
        renormalize=renormalize,
    )
    probabilities = torch.softmax(logits.double(), dim=-1)
    for row, chosen in enumerate([(1, 3), (0, 2)]):
        expected = {id: probabilities[row, id].item() for id in chosen}
        total = sum(expected.values()) if renormalize else 1.0
        expected = {id: value / total for id, value in expected.items()}
        assert selected(weights, ids)[row] == pytest.approx(expected, rel=1e-5)


def test_a_custom_routing_function_decides():
    seen = {}

    def custom(hidden_states, gating_output, topk, renormalize):
        seen.update(gating=gating_output, topk=topk, renormalize=renormalize)
        return WEIGHTS.double(), IDS.long()

    logits = torch.randn(2, 4)
    weights, ids = select_experts(
        cpu_moe.select_experts,
        hidden_states=torch.zeros(2, 8),
        router_logits=logits,
        top_k=2,
        use_grouped_topk=False,
        renormalize=True,
        custom_routing_function=custom,
    )
    assert seen == {"gating": logits, "topk": 2, "renormalize": True}
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(weights, WEIGHTS)
    assert torch.equal(ids, IDS)
