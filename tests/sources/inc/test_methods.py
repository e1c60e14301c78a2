# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales are those of INC's own calculators, of its files, and of a second formula."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sources.inc import inc_oracle
from vllm.fp8_inc.sources.inc.files import NodeRecord, read_nodes
from vllm.fp8_inc.sources.inc.methods import (
    dequant_scales,
    weight_dequant_scales,
)
from vllm.fp8_inc.sources.inc.node_scales import (
    cached_scales,
    compute_scales,
    input_amax,
)
from vllm.fp8_inc.sources.inc.nodes import type_of
from vllm.fp8_inc.sources.inc.rules import DYNAMIC_ONLY, METHODS
from vllm.fp8_inc.sources.inc.schema import QuantConfig

SAMPLES = Path(__file__).parent / "samples"
STATIC = sorted(METHODS.keys() - DYNAMIC_ONLY)
DEVICES = ["gaudi2", "gaudi3"]
FULL_SCALE = {"gaudi2": 240.0, "gaudi3": 448.0}
AMAX = st.floats(2**-20, 2**15, width=32)


def config(method="maxabs_hw", **keys):
    return QuantConfig.model_validate(
        {"dump_stats_path": "./x", "scale_method": method} | keys
    )


WORKED = {
    ("maxabs_hw", "gaudi2"): [0.0625, 0.0625, 1, 16],
    ("maxabs_hw", "gaudi3"): [0.0078125, 0.0625, 1, 16],
    ("maxabs_pow2", "gaudi2"): [0.015625, 0.0625, 1, 16],
    ("maxabs_pow2", "gaudi3"): [0.0078125, 0.0625, 1, 16],
    ("maxabs_arbitrary", "gaudi2"): [0.008362, 0.06177, 0.9492, 15],
    ("maxabs_arbitrary", "gaudi3"): [0.004456, 0.03296, 0.5078, 8.0625],
    ("unit_scale", "gaudi2"): [1, 1, 1, 1],
    ("unit_scale", "gaudi3"): [1, 1, 1, 1],
    ("hw_aligned_single_scale", "gaudi2"): [16] * 4,
    ("hw_aligned_single_scale", "gaudi3"): [128] * 4,
}


@pytest.mark.parametrize("case", WORKED, ids="-".join)
def test_the_worked_table(case):
    method, device = case
    rule = METHODS[method.upper()].activation
    scales = dequant_scales([0.5, 3.7, 57, 900], rule, device, torch.bfloat16)
    assert scales == pytest.approx(WORKED[case], rel=2**-11)


def bf16(value):
    return float(np.float32(value).astype(ml_dtypes.bfloat16))


def by_formula(amax, method, device):
    """The rule in numpy, each step rounded by ml_dtypes."""
    scale = bf16(np.float32(bf16(amax)) / np.float32(FULL_SCALE[device] * 0.25))
    if method == "maxabs_arbitrary":
        return scale
    exponent = math.ceil(bf16(np.log2(np.float32(scale))))
    if method == "maxabs_pow2":
        return 2.0**exponent
    if device == "gaudi3":
        return 2.0 ** min(max(exponent, -55), 7)
    allowed = [1 / 256, 1 / 16, 1.0, 16.0]
    return next((s for s in allowed if s >= 2.0**exponent), 16.0)


@settings(max_examples=300, deadline=None)
@given(
    AMAX,
    st.sampled_from(["maxabs_hw", "maxabs_pow2", "maxabs_arbitrary"]),
    st.sampled_from(DEVICES),
)
def test_a_second_formula_agrees(amax, method, device):
    rule = METHODS[method.upper()].activation
    (scale,) = dequant_scales([amax], rule, device, torch.bfloat16)
    assert scale == by_formula(amax, method, device)


@settings(max_examples=150, deadline=None)
@given(st.lists(AMAX, min_size=3, max_size=3), st.sampled_from(DEVICES))
def test_of_many_channels_and_of_many_ranks_the_largest_counts(channels, device):
    path = "model.layers.0.self_attn.attn.impl.k_cache"
    for method in ("maxabs_hw", "maxabs_pow2", "maxabs_arbitrary"):

        def scale(*amax):
            record = {path: NodeRecord((amax,))}
            return compute_scales(config(method), device, record)[path].inputs[0]  # noqa: B023

        assert scale(*channels) == max(map(scale, channels))


MODULES = {
    "model.layers.3.self_attn.attn.impl.k_cache": "VLLMKVCache",
    "model.layers.3.self_attn.mla_attn.mla_attn.impl.latent_cache_k": "VLLMKVCache",
    "model.layers.3.self_attn.attn.impl.matmul_qk": "Matmul",
    "model.layers.3.self_attn.attn.impl.batch2block_matmul": "B2BMatmul",
    "model.layers.3.self_attn.attn.impl.fused_scaled_dot_product_attention": (
        "ModuleFusedSDPA"
    ),
    "model.layers.3.mlp.experts.moe_op": "VllmMixtureOfExpertsOp",
    "model.layers.3.mlp.down_proj": "RowParallelLinear",
    "model.layers.3.self_attn.qkv_proj": "QKVParallelLinear",
}
COUNTS = {
    "VLLMKVCache": (1, 0),
    "Matmul": (2, 0),
    "B2BMatmul": (2, 1),
    "ModuleFusedSDPA": (3, 2),
    "VllmMixtureOfExpertsOp": (1, 5),
    "RowParallelLinear": (1, 2),
    "QKVParallelLinear": (1, 0),
}


def random_record(kind, generator, weight=None):
    def values(count):
        exponents = torch.empty(count).uniform_(-9, 11, generator=generator)
        return tuple((value,) for value in exponents.exp2().tolist())

    inputs, outputs = COUNTS[kind]
    amax = None if weight is None else (weight.abs().max().item(),)
    return NodeRecord(values(inputs), values(outputs), amax)


@pytest.mark.parametrize("dtype", ["BF16", "FP32"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", STATIC)
def test_incs_own_calculators_agree(tmp_path, method, device, dtype):
    keys = {"hp_dtype": dtype}
    cfg = inc_oracle.parse(
        {"dump_stats_path": f"{tmp_path}/x", "scale_method": method} | keys
    )
    ours = config(method, **keys)
    generator = torch.Generator().manual_seed(len(method))
    for path, kind in MODULES.items():
        assert type_of(path) == kind
        for _ in range(4):
            weight = None
            if kind.endswith("Linear") and "OPT" not in method:
                weight = torch.randn(8, 16, generator=generator).to(ours.dtype)
            elif kind.endswith("Linear"):
                continue  # INC finds it on the device only
            record = random_record(kind, generator, weight)
            inputs, theirs = inc_oracle.scales(cfg, path, kind, record, device, weight)
            computed = compute_scales(ours, device, {path: record})[path]
            assert list(computed.inputs) == inputs, path
            if weight is None:
                continue
            rule = ours.scheme_of(path, kind).weight
            mine = weight_dequant_scales(weight, rule, device, ours.dtype)
            assert torch.equal(mine.flatten(), theirs.flatten())
            if rule.granularity == "PTS":
                assert computed.weight == (theirs.item(),)
            else:
                assert computed.weight is None


RULES = {
    "default": {
        "weight": {"rounding_method": "hw_aligned", "backoff": 0.5},
        "activation": {"rounding_method": "HW_ALIGNED", "backoff": 0.25},
    },
    "nodes": {
        "model.layers.3.self_attn.attn.impl.k_cache": {
            "activation": {"rounding_method": "POW2", "backoff": 0.125},
            "weight": {"rounding_method": "pow2"},
        },
    },
    "layers": {"4": {"activation": {"backoff": 1.0}, "weight": {"backoff": 1.0}}},
    "layer_types": {
        "Matmul": {
            "activation": {"rounding_method": "IDENTITY", "backoff": 0.7},
            "weight": {"rounding_method": "IDENTITY"},
        }
    },
}


@pytest.mark.parametrize("device", DEVICES)
def test_rules_by_node_layer_and_type_are_found_as_inc_finds_them(tmp_path, device):
    cfg = inc_oracle.parse({"dump_stats_path": f"{tmp_path}/x", "scale_method": RULES})
    ours = config(RULES)
    generator = torch.Generator().manual_seed(7)
    seen = set()
    for layer in (3, 4, 44):
        for path, kind in MODULES.items():
            path = path.replace(".3.", f".{layer}.")
            if kind.endswith("Linear"):
                continue
            record = random_record(kind, generator)
            inputs, _ = inc_oracle.scales(cfg, path, kind, record, device)
            assert list(compute_scales(ours, device, {path: record})[path].inputs) == (
                inputs
            ), path
            seen.add(ours.scheme_of(path, kind).activation.backoff)
    assert seen == {0.25, 0.125, 1.0, 0.7}


def test_an_opt_weight_is_left_to_the_device():
    rule = METHODS["MAXABS_HW_OPT_WEIGHT"].weight
    with pytest.raises(ValueError, match="on the device only; keep the cached scale"):
        weight_dequant_scales(torch.ones(2, 2), rule, "gaudi2", torch.bfloat16)


# Just above a power of two: in bf16 on a CPU amax/112 is 0.126, on the device 0.1256.
BOUNDARY = {
    "model.layers.16.self_attn.attn.impl.k_cache": 14.0625,
    "model.layers.16.self_attn.attn.impl.matmul_qk": 14.0625,
}


def test_the_cached_scales_of_every_sample_are_recomputed():
    total, other = 0, {}
    for path in sorted(SAMPLES.glob("*/*_MAXABS_HW*.json")):
        device = "gaudi2" if "_g2" in path.parent.name else "gaudi3"
        measured = read_nodes(
            path.with_name(path.name.replace("_MAXABS_HW", "")), "DynamicRange"
        )
        computed = compute_scales(config(), device, measured)
        for node, scales in cached_scales(read_nodes(path, "Scale")).items():
            if scales.weight:
                assert scales.weight == computed[node].weight
            pairs = zip(computed[node].inputs, scales.inputs, strict=True)
            for i, (mine, cached) in enumerate(pairs):
                total += 1
                if mine != cached:
                    other[node] = input_amax(node, measured[node])[i][0]
                    assert (mine, cached) == (0.25, 0.125)
    assert total == 413
    assert other == BOUNDARY


def test_an_amax_of_zero_is_marked_in_measured_and_cached_scales():
    zero = {"model.layers.0.self_attn.attn.impl.k_cache": NodeRecord(((0.0,),))}
    for method in ("maxabs_hw", "maxabs_arbitrary"):
        (scales,) = compute_scales(config(method), "gaudi3", zero).values()
        assert scales.inputs == (0.0,)
    smallest = {"model.layers.0.mlp.moe_op": NodeRecord(((0.5,), (2.0**-55,)))}
    (scales,) = cached_scales(smallest).values()
    assert scales.inputs == (0.5, 0.0)
    assert json.dumps(scales.inputs) == "[0.5, 0.0]"
