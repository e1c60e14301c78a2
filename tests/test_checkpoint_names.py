# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which keys of a checkpoint are attention scales, and what config.json declares."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests import checkpoints
from vllm.fp8_inc.sources.checkpoint import (
    ScaleKey,
    declared_scheme,
    file_of,
    layer_index,
    layer_of,
    match_scale_key,
)

ARABIC = ".\N{ARABIC-INDIC DIGIT THREE}"  # which \d matches too
PARTS = ["model.", ".", "layers", ".3", ARABIC, ".self_attn", ".attn", ".k_scale"]
PREFIXES = ["", "model.", "language_model.model.", "model.language_model."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layer", [0, 7, 60])
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_scale_beside_the_projections_is_found_with_any_prefix(prefix, layer, role):
    found = match_scale_key(f"{prefix}layers.{layer}.self_attn.{role}_scale")
    assert found == ScaleKey(f"layers.{layer}.self_attn", role)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.3.self_attn.k_proj.weight_scale",
        "model.layers.3.self_attn.k_proj.input_scale",
        "model.layers.3.self_attn.k_proj.weight",
        "model.layers.3.self_attn.kv_a_proj_with_mqa.input_scale",
        "model.layers.3.self_attn.xk_scale",
        "model.layers.3.self_attn.k_scale.weight",
        "model.layers.3.self_attn.k_scale\n",
        "model.layers.3.self_attn.K_scale",
        "model.layers.3.self_attn.o_scale",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.k_scale",
        "model.layers.x.self_attn.k_scale",
        "model.layers.-1.self_attn.k_scale",
        "model.layers..self_attn.k_scale",
        "xlayers.3.self_attn.k_scale",
        "model.xlayers.3.self_attn.k_scale",
        "k_scale",
        "",
    ],
)
def test_everything_else_is_no_scale(key):
    assert match_scale_key(key) is None


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from(PARTS)).map("".join))
def test_no_string_whatever_makes_matching_fail(key):
    found = match_scale_key(key)
    if found is not None:
        assert key.endswith(f"{found.layer}.{found.role}_scale")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layer", [0, 7, 60])
def test_a_layer_of_the_engine_has_the_name_that_its_scales_have(prefix, layer):
    name = layer_of(f"{prefix}layers.{layer}.self_attn.attn")
    key = match_scale_key(f"model.layers.{layer}.self_attn.v_scale")
    assert name == key.layer
    assert layer_index(name) == layer


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn",
        "model.layers.3.self_attn.attn.k",
        "model.layers.3.cross_attn.attn",
        "model.xlayers.3.self_attn.attn",
        "",
    ],
)
def test_another_module_is_no_layer_with_scales(name):
    assert layer_of(name) is None


def test_every_scale_of_a_checkpoint_is_found_and_no_other_key_is():
    config = checkpoints.deepseek_config()
    scales = checkpoints.kv_scales(config)
    tensors = checkpoints.quantize(checkpoints.weights(config)) | scales
    assert {key for key in tensors if match_scale_key(key)} == scales.keys()


@pytest.mark.parametrize("config", [None, {}, {"kv_cache_scheme": None}])
def test_a_checkpoint_without_a_scheme_declares_none(config):
    assert declared_scheme(config) is False


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
        ("strategy", "attn_head"),
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


def test_a_key_is_found_in_the_shard_that_holds_it(tmp_path):
    for shard, key in enumerate(["a.k_scale", "b.k_scale"], start=1):
        path = tmp_path / f"model-0000{shard}-of-00002.safetensors"
        save_file({key: torch.ones(1)}, path)
        assert file_of(key, str(tmp_path)) == str(path)
    assert file_of("a.k_scale", str(tmp_path)).endswith("-00001-of-00002.safetensors")


def test_a_key_in_no_file_is_said_to_be_of_the_checkpoint(tmp_path):
    assert file_of("a.k_scale", str(tmp_path)) == f"checkpoint {tmp_path}"
    assert file_of("a.k_scale", "some/model") == "checkpoint some/model"
