# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What config.json declares about KV scales."""

import pytest

from tests import checkpoints
from vllm.fp8_inc.sources.checkpoint import declared_scheme


@pytest.mark.parametrize("config", [None, {}, {"kv_cache_scheme": None}])
def test_a_checkpoint_without_a_scheme_declares_none(config):
    assert declared_scheme(config) is False


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quantization": {"kv_cache_quant_algo": "fp8"}},
        {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj"]}},
    ],
)
def test_modelopt_and_quark_declare_theirs(config):
    assert declared_scheme(config) is True


@pytest.mark.parametrize(
    "config",
    [
        {"kv_cache_quant_algo": None},
        {"export": {"kv_cache_group": []}},
        {"export": None},
    ],
)
def test_modelopt_and_quark_may_declare_none(config):
    assert declared_scheme(config) is False


@pytest.mark.parametrize("algorithm", ["NVFP4", "INT8", 8])
def test_another_algorithm_of_modelopt_is_an_error(algorithm):
    with pytest.raises(ValueError) as error:
        declared_scheme({"kv_cache_quant_algo": algorithm})
    assert f"kv_cache_quant_algo is {algorithm!r}" in str(error.value)
    assert "--kv-cache-dtype auto" in str(error.value)


@pytest.mark.parametrize("changes", [{}, {"dynamic": None}, {"observer": "minmax"}])
def test_a_static_fp8_scheme_is_declared(changes):
    config = checkpoints.quantization_config()
    config["kv_cache_scheme"] |= changes
    assert declared_scheme(config) is True


@pytest.mark.parametrize(
    "entry, value",
    [
        ("num_bits", 4),
        ("num_bits", None),
        ("type", "int"),
        ("strategy", "channel"),
        ("dynamic", True),
        ("dynamic", "local"),
        ("symmetric", False),
    ],
)
def test_another_scheme_is_an_error_that_names_entry_value_and_way_out(entry, value):
    config = checkpoints.quantization_config()
    config["kv_cache_scheme"][entry] = value
    with pytest.raises(ValueError) as error:
        declared_scheme(config)
    text = str(error.value)
    assert f"quantization_config.kv_cache_scheme.{entry} is {value!r}" in text
    assert "--kv-cache-dtype auto" in text
