# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which keys of a checkpoint are attention scales, and whose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchmarks.scale_names import checkpoint_names, compare
from tests import checkpoints
from vllm.fp8_inc.sources.checkpoint import (
    ScaleKey,
    file_of,
    files_of,
    key_in_layer,
    layer_index,
    layer_of,
    match_scale_key,
    producers_of,
)
from vllm.fp8_inc.sources.producers import PRODUCERS

ARABIC = ".\N{ARABIC-INDIC DIGIT THREE}"  # which \d matches too
PARTS = ["model.", ".", "layers", ".3", ARABIC, ".self_attn", ".attn", ".k_scale"]
PREFIXES = ["", "model.", "language_model.model.", "model.language_model."]
K, V, KV = ("k",), ("v",), ("k", "v")

# Written out by hand from the producers' code, not derived from the table.
KEYS = {
    "model.layers.3.self_attn.kv_scale": (KV, "dequant_scale"),
    "model.layers.3.self_attn.k_scale": (K, "dequant_scale"),
    "model.layers.3.self_attn.v_scale": (V, "dequant_scale"),
    "model.layers.3.self_attn.q_scale": (("q",), "dequant_scale"),
    "model.layers.3.self_attn.k_zero_point": (K, "zero"),
    "model.layers.3.self_attn.v_zero_point": (V, "zero"),
    "model.layers.3.self_attn.q_zero_point": (("q",), "zero"),
    "model.layers.3.self_attn.q_latent_scale": (("q_latent",), "dequant_scale"),
    "model.layers.3.self_attn.prob_scale": (("prob",), "dequant_scale"),
    "model.layers.3.self_attn.q_max": ((), "ignored"),
    "model.layers.3.self_attn.k_proj.output_scale": (K, "dequant_scale"),
    "model.layers.3.self_attn.v_proj.output_scale": (V, "dequant_scale"),
    "model.layers.3.self_attn.q_proj.output_scale": (("q",), "dequant_scale"),
    "model.layers.3.self_attn.kv_b_proj.output_scale": (KV, "dequant_scale"),
    "model.layers.3.self_attn.prob_output_scale": (("prob",), "dequant_scale"),
    "model.layers.3.self_attn.k_proj.k_scale": (K, "dequant_scale"),
    "model.layers.3.self_attn.v_proj.v_scale": (V, "dequant_scale"),
    "backbone.layers.3.mixer.k_proj.k_scale": (K, "dequant_scale"),
    "backbone.layers.3.mixer.v_proj.v_scale": (V, "dequant_scale"),
    "transformer.layers.3.attention.kv_cache_scaling_factor": (KV, "dequant_scale"),
    "model.layers.3.self_attn.q.scale": (("q",), "dequant_scale"),
    "model.layers.3.self_attn.k_cache.scale": (K, "dequant_scale"),
    "model.layers.3.self_attn.v_cache.scale": (V, "dequant_scale"),
    "model.layers.3.self_attn.qkv_proj.k_scale": (K, "dequant_scale"),
    "model.layers.3.self_attn.qkv_proj.v_scale": (V, "dequant_scale"),
    "model.layers.3.self_attn.qkqkv_proj.k_scale": (K, "dequant_scale"),
    "model.layers.3.self_attn.qkqkv_proj.v_scale": (V, "dequant_scale"),
    "layers.3.attention.q_fake_quantizer.qscale_act": (("q",), "dequant_scale"),
    "layers.3.attention.k_fake_quantizer.qscale_act": (K, "dequant_scale"),
    "layers.3.attention.v_fake_quantizer.qscale_act": (V, "dequant_scale"),
    "layers.3.attention.kv_fake_quantizer.qscale_act": (KV, "dequant_scale"),
    "model.layers.3.self_attn.attn.impl.k_cache.dequant_output.scale": (
        K,
        "dequant_scale",
    ),
    "model.layers.3.self_attn.attn.impl.v_cache.dequant_output.scale": (
        V,
        "dequant_scale",
    ),
    "model.layers.3.self_attn.attn.impl.k_cache.quant_input.scale_inv": (
        K,
        "quant_scale",
    ),
    "model.layers.3.self_attn.attn.impl.v_cache.quant_input.scale_inv": (
        V,
        "quant_scale",
    ),
    "model.layers.3.self_attn.mla_attn.impl.latent_cache_k.dequant_output.scale": (
        KV,
        "dequant_scale",
    ),
    "model.layers.3.self_attn.mla_attn.mla_attn.impl.latent_cache_k"
    ".quant_input.scale_inv": (KV, "quant_scale"),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_producer_has_its_layer_roles_and_direction(key):
    found = match_scale_key(key)
    assert (found.roles, found.use) == KEYS[key]
    assert (found.layer, found.tower) == ("layers.3", False)
    assert key.endswith(f".{found.name}")


def test_every_name_of_the_table_is_tested():
    assert {match_scale_key(key).name for key in KEYS} == {
        name for row in PRODUCERS for name in row.tensors
    }


def test_two_producers_with_one_name_mean_the_same():
    meanings = {}
    for row in PRODUCERS:
        for name, tensor in row.tensors.items():
            assert meanings.setdefault(name, tensor) == tensor, (row.name, name)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layer", [0, 7, 60])
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_scale_beside_the_projections_is_found_with_any_prefix(prefix, layer, role):
    found = match_scale_key(f"{prefix}layers.{layer}.self_attn.{role}_scale")
    assert found == ScaleKey(f"layers.{layer}", f"{role}_scale")
    assert found.roles == (role,)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.3.self_attn.k_proj.weight_scale",
        "model.layers.3.self_attn.k_proj.weight_scale_inv",
        "model.layers.3.self_attn.k_proj.input_scale",
        "model.layers.3.self_attn.qkv_proj.weight_scale",
        "model.layers.3.self_attn.qkv_proj.output_scale",
        "model.layers.3.self_attn.o_proj.output_scale",
        "model.layers.3.self_attn.k_proj.v_scale",
        "model.layers.3.self_attn.k_proj.weight",
        "model.layers.3.self_attn.kv_a_proj_with_mqa.input_scale",
        "model.layers.3.mlp.gate_proj.output_scale",
        "layers.3.attention.wk.qscale_act",
        "layers.3.attention.wk.qscale_weight",
        "model.layers.3.self_attn.k_norm.scale",
        "model.layers.3.self_attn.scale",
        "model.layers.3.linear_attn.k_scale",
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
        f"model.layers.{'9' * 5000}.self_attn.k_scale",
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
        assert f"{found.layer}." in key
        assert key.endswith(f".{found.name}")


@pytest.mark.parametrize(
    "prefix",
    [
        "vision_tower.transformer.",
        "model.vision_tower.vision_model.encoder.",
        "visual.",
        "vision_model.encoder.",
        "multi_modal_projector.",
        "audio_tower.",
        "model.speech_encoder.",
        "encoder.",
    ],
)
@pytest.mark.parametrize("stack", ["layers", "blocks"])
def test_the_scale_of_a_tower_is_told_from_the_models(prefix, stack):
    assert match_scale_key(f"{prefix}{stack}.3.self_attn.k_scale").tower
    assert layer_of(f"{prefix}{stack}.3.self_attn.attn") is None


@pytest.mark.parametrize("prefix", ["decoder.", "model.revision.", "encoder_2.x."])
def test_a_prefix_with_a_similar_word_is_no_tower(prefix):
    assert not match_scale_key(f"{prefix}layers.3.self_attn.k_scale").tower


@pytest.mark.parametrize(
    "name",
    [
        *(f"{prefix}layers.7.self_attn.attn" for prefix in PREFIXES),
        "model.layers.7.self_attn.mla_attn",
        "model.layers.7.self_attn.mla_attn.mla_attn",
        "model.layers.7.mtp_block.self_attn.attn",
        "model.layers.7.mixer.attn",
        "model.layers.7.attn.attn",
        "model.layers.7.attention.attn",
        "transformer.h.7.attn.attn",
        "transformer.h.7.self_attention.attn",
        "transformer.blocks.7.attn.attn",
    ],
)
@pytest.mark.parametrize(
    "key", ["layers.7.attention.kv_fake_quantizer.qscale_act", "h.7.attn.v_scale"]
)
def test_a_layer_of_the_engine_meets_its_scales_whatever_they_call_it(name, key):
    assert layer_of(name) == match_scale_key(key).layer == "layers.7"
    assert layer_index(layer_of(name)) == 7


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


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_renamed_to_another_layer(key):
    assert key_in_layer(key, "layers.12") == key.replace(".3.", ".12.").replace(
        "layers.3.", "layers.12."
    )


def test_a_draft_model_that_counts_from_0_is_apart_from_the_model():
    draft = match_scale_key("mtp.layers.0.self_attn.k_scale")
    assert draft == ScaleKey("mtp.layers.0", "k_scale")
    assert match_scale_key("model.layers.0.self_attn.k_scale").layer == "layers.0"
    assert layer_of("mtp.layers.0.self_attn.attn") == "mtp.layers.0"
    assert layer_of("draft_model.model.layers.0.self_attn.attn") == "layers.0"
    assert layer_index("mtp.layers.12") == 12


def test_only_a_scale_is_renamed_to_another_layer():
    with pytest.raises(ValueError, match="lm_head.weight is no attention scale"):
        key_in_layer("lm_head.weight", "layers.12")


COMPRESSED = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    "names, config, expected",
    [
        ("k_scale v_scale", COMPRESSED, "llm-compressor (KV cache)"),
        ("q_scale k_scale v_scale", COMPRESSED, "llm-compressor (attention)"),
        ("k_scale v_scale", COMPRESSED | {"provider": "auto-round"}, "AutoRound"),
        ("k_scale v_scale", {"quant_method": "fp8"}, "AutoFP8 (newer)"),
        ("k_scale v_scale", None, "AutoFP8 (newer)"),
        (
            "k_proj.output_scale v_proj.output_scale",
            COMPRESSED,
            "compressed-tensors before August 2024",
        ),
        (
            "k_proj.output_scale v_proj.output_scale",
            {"quant_method": "quark"},
            "Quark",
        ),
        ("k_proj.output_scale prob_output_scale", COMPRESSED, "Quark"),
        ("k_proj.k_scale", None, "ModelOpt"),
        ("kv_scale", {"quant_method": "inc"}, "INC (vLLM-compatible save)"),
        (
            "kv_scale",
            None,
            "AutoFP8 (old), early Quark or INC (vLLM-compatible save)",
        ),
        ("k_cache.scale qkv_proj.v_scale", None, None),
    ],
)
def test_names_and_config_tell_the_producer(names, config, expected):
    keys = [f"model.layers.1.self_attn.{name}" for name in names.split()]
    if expected is None:
        expected = "AngelSlim (HYV3) and Qwen3-MoE, renamed on the way"
    assert producers_of(keys, config) == expected


def test_the_name_of_the_module_tells_the_producer():
    keys = ["backbone.layers.1.mixer.k_proj.k_scale"]
    assert producers_of(keys, None) == "ModelOpt (Nemotron-H)"


def test_every_scale_of_a_checkpoint_is_found_and_no_other_key_is():
    config = checkpoints.deepseek_config()
    scales = checkpoints.kv_scales(config)
    tensors = checkpoints.quantize(checkpoints.weights(config)) | scales
    assert {key for key in tensors if match_scale_key(key)} == scales.keys()


def test_the_benchmarks_names_are_those_of_a_checkpoint_with_183_scales():
    names = checkpoint_names()
    assert len(names) == len(set(names)) > 90_000
    assert sum(match_scale_key(name) is not None for name in names) == 61 * 3


def test_the_names_of_a_large_checkpoint_cost_a_few_string_operations_each():
    matching, passing = compare(repeats=5)
    assert matching < 3 * passing  # about 1.5; 4.7 with the regex on every name


def test_a_key_is_found_in_the_shard_that_holds_it(tmp_path):
    for shard, key in enumerate(["a.k_scale", "b.k_scale"], start=1):
        path = tmp_path / f"model-0000{shard}-of-00002.safetensors"
        save_file({key: torch.ones(1)}, path)
        assert file_of(key, str(tmp_path)) == str(path)
    assert file_of("a.k_scale", str(tmp_path)).endswith("-00001-of-00002.safetensors")
    save_file({"a.k_scale": torch.ones(1)}, tmp_path / "model-00003.safetensors")
    assert len(files_of("a.k_scale", str(tmp_path))) == 2


def test_a_key_in_no_file_is_said_to_be_of_the_checkpoint(tmp_path):
    assert file_of("a.k_scale", str(tmp_path)) == f"checkpoint {tmp_path}"
    assert file_of("a.k_scale", "some/model") == "checkpoint some/model"
