# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which layers of a checkpoint with quant_method fp8 are ours."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.fp8_inc.layers.fp8 import Fp8IncFp8Config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8KVCacheMethod

STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def config(**changes):
    loaded = Fp8IncFp8Config.from_config(DYNAMIC | changes)
    loaded.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    return loaded


def method_of(config, kind, prefix):
    """The method, without building a real layer."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    vllm_config = SimpleNamespace(additional_config={"fp8_inc": {"device": "gaudi2"}})
    name = "vllm.fp8_inc.layers.served.get_current_vllm_config"
    with mock.patch(name, lambda: vllm_config):
        return layer, config.get_quant_method(layer, prefix)


@pytest.mark.parametrize(
    "changes, weights, static, key",
    [
        (STATIC, "tensor", True, "weight_scale"),
        (DYNAMIC, "tensor", False, "weight_scale"),
        ({"weight_block_size": [64, 128]}, "block", False, "weight_scale_inv"),
    ],
)
def test_the_recipe_is_that_of_the_config(changes, weights, static, key):
    layer, _ = method_of(config(**changes), LinearBase, "model.layers.0.mlp.down_proj")
    recipe = layer.scheme.recipe
    assert (recipe.weights, recipe.static_inputs) == (weights, static)
    assert recipe.scale_name == key
    assert recipe.adjustment.served_on.name == "gaudi2"
    if weights == "block":
        assert recipe.block == (64, 128)


@pytest.mark.parametrize(
    "flavor, quantised_for", [(None, "gaudi3"), ("float8_e4m3fnuz", "gaudi2")]
)
def test_the_flavour_of_the_checkpoint_is_known(flavor, quantised_for):
    changes = {"fp8_dtype_flavor": flavor} if flavor else {}
    layer, _ = method_of(config(**changes), LinearBase, "model.layers.0.mlp.down_proj")
    assert layer.scheme.recipe.adjustment.quantised_for.name == quantised_for


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_unquantised_layers_stay_upstreams(key):
    names = [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]
    loaded = config(**{key: names})
    for leaf in ("gate_up_proj", "down_proj"):
        layer, method = method_of(loaded, LinearBase, f"model.layers.0.mlp.{leaf}")
        assert type(method) is UnquantizedLinearMethod
        assert not hasattr(layer, "scheme")
    layer, _ = method_of(loaded, LinearBase, "model.layers.1.mlp.down_proj")
    assert layer.scheme.layer_name == "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("cache, upstream", [("fp8_inc", False), ("fp8", True)])
def test_upstream_loads_the_scales_of_its_own_fp8_cache(cache, upstream):
    served = VllmConfig(cache_config=CacheConfig(cache_dtype=cache))
    with set_current_vllm_config(served):
        method = config().get_quant_method(mock.Mock(spec=Attention), "layer")
    assert isinstance(method, Fp8KVCacheMethod) == upstream


def test_float32_is_served():
    assert torch.float32 in Fp8IncFp8Config.get_supported_act_dtypes()
