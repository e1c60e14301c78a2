# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Experts with unequal scales, their float64 result, and DeepSeek's grouped routing."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from tests import device_numbers
from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.layers.moe import Fp8MoEMethod
from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

EXPERTS, HIDDEN, WIDTH = 4, 32, 16
NAME = "model.layers.2.mlp.experts"
# The largest, which serves all of gate and up, is neither first nor last.
GATE_INPUTS = [0.012, 0.0317, 0.02, 0.011]
UP_INPUTS = [0.014, 0.0217, 0.019, 0.013]
DOWN_INPUTS = [0.05, 0.021, 0.013, 0.034]
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def moe_method(strategy, made_for, served_on, activation="silu", **config):
    defaults = {
        "activation": MoEActivation(activation),
        "in_dtype": torch.bfloat16,
        "is_act_and_mul": True,
        "swiglu_limit": None,
        "has_bias": False,
    }
    config = SimpleNamespace(**defaults | config)
    adjustment = Adjustment(FORMATS[made_for], FORMATS[served_on], "as the test says")
    return Fp8MoEMethod(
        Fp8Recipe(strategy, True, adjustment),
        SimpleNamespace(moe_config=config),
        NAME,
    )


def _load(parameter, value, name, shard, expert):
    target = parameter.data[expert]
    target.copy_(
        value.expand(target.shape) if value.dim() == 0 else value.view_as(target)
    )


class Experts:
    """Gate, up and down of each expert: weights and scales that all differ."""

    def __init__(self, fp8_weight, strategy="tensor", made_for="gaudi3"):
        self.strategy, self.made_for = strategy, made_for

        def build(rows, columns, size, seed):
            maximum = device_numbers.MAXIMUM[made_for]
            return fp8_weight(rows, columns, strategy, maximum, size, seed)

        self.gate, self.up, self.down = (
            [
                build(rows, columns, size * (1 + e), 10 * part + e)
                for e in range(EXPERTS)
            ]
            for part, (rows, columns, size) in enumerate(
                [(WIDTH, HIDDEN, 0.2), (WIDTH, HIDDEN, 0.03), (HIDDEN, WIDTH, 0.3)]
            )
        )

    def load(self, served_on="gaudi3", activation="silu", **changes):
        """The stand-in for vLLM's RoutedExperts, after loading.

        ``changes`` replace what expert 1 loads: a value, a list of
        values for each shard of it, or None for nothing.
        """
        method = moe_method(self.strategy, self.made_for, served_on, activation)
        layer = torch.nn.Module()
        layer._map_global_expert_id_to_local_expert_id = lambda expert: expert
        method.create_weights(
            layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16, weight_loader=_load
        )
        for e in range(EXPERTS):
            layer.w13_weight.data[e] = torch.cat([self.gate[e][0], self.up[e][0]])
            layer.w2_weight.data[e] = self.down[e][0]
            gate_up_scale = torch.cat([self.gate[e][1], self.up[e][1]])
            shards = {
                "w13_weight_scale": [gate_up_scale],
                "w2_weight_scale": [self.down[e][1]],
                "w13_input_scale": [GATE_INPUTS[e], UP_INPUTS[e]],
                "w2_input_scale": [DOWN_INPUTS[e]],
            }
            for name, values in shards.items():
                parameter = getattr(layer, name)
                if e == 1 and name in changes:
                    change = changes[name]
                    values = change if isinstance(change, list) else [change]
                for shard, value in zip(("w1", "w3"), values, strict=False):
                    if value is not None:
                        value = torch.as_tensor(value)
                        parameter.weight_loader(parameter, value, name, shard, e)
        method.process_weights_after_loading(layer)
        layer.method, layer.served_on, layer.kind = method, served_on, activation
        return layer

    def product(self, x, part, expert, input_scale, served_on):
        """bf16 of the float64 product of one projection."""
        maxima = device_numbers.MAXIMUM
        input_scale *= maxima[self.made_for] / maxima[served_on]
        codes, scale = part[expert]
        out = device_numbers.gemm(x, codes, input_scale, served_on)
        return torch.from_numpy(out * scale.double().flatten().numpy()).bfloat16()

    def expected(self, layer, x, weights, ids, on_input=False):
        """float64 [tokens, hidden], token by token and expert by expert."""
        act, device = ACTIVATIONS[layer.kind], layer.served_on
        out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        for token, (row, chosen) in enumerate(zip(weights, ids, strict=True)):
            for weight, e in zip(row.double(), chosen.tolist(), strict=True):
                if e < 0:
                    continue
                hidden = x[token : token + 1]
                if on_input:
                    hidden = (hidden.double() * weight).bfloat16()
                gate = self.product(hidden, self.gate, e, max(GATE_INPUTS), device)
                up = self.product(hidden, self.up, e, max(GATE_INPUTS), device)
                middle = (act(gate.double()) * up.double()).bfloat16()
                down = self.product(middle, self.down, e, DOWN_INPUTS[e], device)
                out[token] += down[0].double() * (1.0 if on_input else weight)
        return out


def grouped_top_k(logits, bias, groups, top_groups, top_k, factor):
    """DeepSeek-V3's routing, in numpy: {expert: weight} of each token.

    The biased scores choose the groups (by the sum of their two best) and the
    experts; the weights are the scores without the bias.
    """
    result = []
    for scores in 1 / (1 + np.exp(-np.asarray(logits, np.float64))):
        biased = (scores + np.asarray(bias)).reshape(groups, -1)
        best = np.argsort(-np.sort(biased, axis=1)[:, -2:].sum(axis=1))[:top_groups]
        allowed = np.full_like(biased, -np.inf)
        allowed[best] = biased[best]
        ids = np.argsort(-allowed.ravel())[:top_k]
        weights = scores[ids] / scores[ids].sum() * factor
        result.append(dict(zip(ids.tolist(), weights.tolist(), strict=True)))
    return result
