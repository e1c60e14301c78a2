# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which layers of modelopt, quark, auto-round and inc are ours, and what is refused."""

from unittest import mock

import pytest

from tests.layers.test_fp8_config import method_of
from tests.quant_methods import (
    CHANNEL,
    FORMATS,
    STATIC,
    auto_round,
    modelopt,
    modelopt_mixed,
    quark,
    quark_spec,
)
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.fp8_inc.layers.inc import Fp8IncINCConfig
from vllm.fp8_inc.layers.modelopt import Fp8IncModelOptConfig, Fp8IncModelOptMixedConfig
from vllm.fp8_inc.layers.quark import Fp8IncQuarkConfig
from vllm.fp8_inc.layers.served import ServedOnCpu
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.quark.schemes import QuarkW8A8Int8

DOWN = "model.layers.1.mlp.down_proj"
INT4 = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}


def recipe_of(config: ServedOnCpu, kind: type, prefix: str):
    """The recipe, without building a real layer."""
    with mock.patch.object(type(config), "adjustment", lambda self: None):
        return config.recipe_of(mock.Mock(spec=kind), prefix)


def test_mixed_precision_refuses_what_no_cpu_kernel_serves():
    declared = modelopt_mixed([DOWN])
    declared["quantized_layers"][DOWN]["quant_algo"] = "NVFP4"
    config = Fp8IncModelOptMixedConfig.from_config(declared)
    with pytest.raises(ValueError, match=rf"^{DOWN}: quantized_layers says NVFP4"):
        method_of(config, LinearBase, DOWN)


@pytest.mark.parametrize(
    "algorithm, expected",
    [
        ("FP8", ("tensor", True)),
        ("fp8_pb_wo", ("block", False)),
        ("FP8_PER_CHANNEL_PER_TOKEN", ("channel", False)),
    ],
)
def test_mixed_precision_takes_each_layer_as_its_table_says(algorithm, expected):
    declared = modelopt_mixed([DOWN])
    declared["quantized_layers"][DOWN]["quant_algo"] = algorithm
    config = Fp8IncModelOptMixedConfig.from_config(declared)
    layer, _ = method_of(config, LinearBase, DOWN)
    recipe = layer.scheme.recipe
    assert (recipe.weights, recipe.static_inputs) == expected
    _, method = method_of(config, LinearBase, DOWN.replace("1", "2"))
    assert type(method) is UnquantizedLinearMethod


@pytest.mark.parametrize("pattern", ["*.experts", "*.experts.*", "*.experts.*_proj"])
def test_quark_experts_have_the_scheme_of_their_pattern(pattern):
    declared = quark(STATIC)([])
    declared["layer_quant_config"][pattern] = CHANNEL
    config = Fp8IncQuarkConfig.from_config(declared)
    experts = "model.layers.1.mlp.experts"
    assert recipe_of(config, RoutedExperts, experts).weights == "channel"
    assert recipe_of(config, LinearBase, DOWN).weights == "tensor"


def test_integers_of_quark_stay_upstreams():
    int8 = quark_spec("per_tensor", False, dtype="int8")
    declared = quark({"weight": int8, "input_tensors": int8})([])
    layer, _ = method_of(Fp8IncQuarkConfig.from_config(declared), LinearBase, DOWN)
    assert type(layer.scheme) is QuarkW8A8Int8


@pytest.mark.parametrize("kind, unquantized", [(LinearBase, False), (None, True)])
def test_integers_of_auto_round_stay_upstreams(kind, unquantized):
    declared = INT4 | {"extra_config": {DOWN: {"bits": 16}} if unquantized else None}
    methods = [
        method_of(config.from_config(declared), LinearBase, DOWN)[1]
        for config in (Fp8IncINCConfig, INCConfig)
    ]
    assert type(methods[0]) is type(methods[1])
    assert (type(methods[0]) is UnquantizedLinearMethod) == unquantized


@pytest.mark.parametrize(
    "key, value",
    [
        ("bits", 4),
        ("act_bits", 16),
        ("act_data_type", "int"),
        ("sym", False),
        ("fmt", "e5m2"),
    ],
)
def test_what_auto_round_calls_fp_and_is_not_w8a8_is_refused(key, value):
    declared = auto_round("auto-round", -1)([]) | {key: value}
    with pytest.raises(ValueError, match=rf"config.json: .*\.{key} is {value!r}"):
        Fp8IncINCConfig.from_config(declared)


@pytest.mark.parametrize("changes", [{"bits": 4}, {"group_size": 64}, {"sym": False}])
def test_a_layer_that_auto_round_quantised_otherwise_is_refused(changes):
    declared = auto_round("inc", -1)([]) | {"extra_config": {DOWN: changes}}
    with pytest.raises(ValueError, match=f"^{DOWN}: "):
        method_of(Fp8IncINCConfig.from_config(declared), LinearBase, DOWN)


def test_a_save_in_incs_own_names_says_what_to_do():
    declared = {"quant_method": "inc", "mode": "LOAD", "fp8_config": "E4M3"}
    with pytest.raises(ValueError, match='format="vllm"'):
        Fp8IncINCConfig.from_config(declared)


@pytest.mark.parametrize("cache, upstream", [("fp8_inc", False), ("fp8", True)])
@pytest.mark.parametrize(
    "config, declared, kind",
    [
        (Fp8IncModelOptConfig, modelopt("FP8"), Attention),
        (Fp8IncModelOptConfig, modelopt("FP8"), MLAAttention),
        (Fp8IncModelOptMixedConfig, modelopt_mixed, Attention),
        (Fp8IncQuarkConfig, quark(STATIC), Attention),
    ],
)
def test_upstream_loads_the_scales_of_its_own_fp8_cache(
    cache, upstream, config, declared, kind
):
    loaded = config.from_config(declared([DOWN]) | {"kv_cache_scheme": FP8_CACHE})
    served = VllmConfig(cache_config=CacheConfig(cache_dtype=cache))
    with set_current_vllm_config(served):
        method = loaded.get_quant_method(mock.Mock(spec=kind), "layer")
    assert isinstance(method, BaseKVCacheMethod) == upstream


FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}


def test_every_quant_method_has_a_row():
    from vllm.fp8_inc.plugin import QUANT_METHODS

    declared = {row.declare([DOWN]).get("quant_method") for row in FORMATS}
    tested_elsewhere = {"fp8"}  # tests/test_weight_numbers.py
    assert {*QUANT_METHODS, "auto-round"} - tested_elsewhere == declared - {None}
