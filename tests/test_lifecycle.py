# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales are right in every kind of model and after all that vLLM does to one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
)

from tests.checkpoints import (
    BUILDERS,
    checkpoint,
    fp8_static,
    kv_scales,
    llama_config,
    quantization_config,
)
from tests.engines import (
    acting,
    ask,
    attention_layers,
    engine,
    loaded,
    model_of,
    prompt,
)


def add_scales(folder: Path, layers: list[int], extra: dict | None = None) -> list:
    """Adds unequal KV scales to a checkpoint; returns those that shall act."""
    path = folder / "model.safetensors"
    scales = {
        f"model.layers.{n}.self_attn.{role}_scale": torch.tensor([base * (1 + n)])
        for n in layers
        for role, base in (("k", 0.013), ("v", 0.037))
    }
    save_file(load_file(path) | scales | (extra or {}), path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config(config_groups={})
    (folder / "config.json").write_text(json.dumps(config))
    return [
        {"k": acting(0.013 * (1 + n)), "v": acting(0.037 * (1 + n)), "q": None}
        for n in layers
    ]


@pytest.mark.parametrize("kind", BUILDERS)
def test_lost_weights_and_scales_come_back_with_a_reload(tmp_path, kind):
    """What sleep level 2 does to a model, on platforms that have it."""
    with engine(fp8_static(tmp_path, kind)) as llm:
        before, scales = ask(llm, [prompt(30)])[0], loaded(llm)
        for tensor in model_of(llm).state_dict().values():
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).fill_(0x7F)  # NaN
            elif tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for layer in attention_layers(llm):
            layer.impl.scales = None
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        assert loaded(llm) == scales
        after = ask(llm, [prompt(30)])[0]
    assert torch.equal(after.logprobs, before.logprobs)


@pytest.mark.parametrize(
    "device", ["gaudi2", pytest.param("gaudi3", marks=pytest.mark.slow)]
)
def test_a_saved_state_keeps_its_scales(tmp_path, caplog_vllm, device):
    """Also where it is served on another device than it was saved from."""
    first = checkpoint(tmp_path / "first", "gqa")
    saved = tmp_path / "saved"
    saved.mkdir()
    shutil.copy(tmp_path / "first" / "config.json", saved)
    with engine(first) as llm:
        llm.collective_rpc("save_sharded_state", kwargs={"path": str(saved)})
    option = {"additional_config": {"fp8_inc": {"device": device}}}
    with engine(first, **option) as llm:
        expected, scales = ask(llm, [prompt(30)])[0], loaded(llm)
    with engine(str(saved), load_format="sharded_state", **option) as llm:
        assert loaded(llm) == scales
        answer = ask(llm, [prompt(30)])[0]
    assert torch.equal(answer.logprobs, expected.logprobs)
    assert "KV scales of 3 layers from a saved state" in caplog_vllm.text


@pytest.mark.parametrize("kind", [pytest.param("mla", marks=pytest.mark.slow), "gqa"])
def test_a_layer_can_keep_an_unquantised_cache(tmp_path, kind):
    path = checkpoint(tmp_path, kind)
    # First, so that upstream has chosen a backend for a layer that looks the same.
    with engine(path, kv_cache_dtype="auto") as llm:
        plain = ask(llm, [prompt(30)])[0]
    with engine(path) as llm:
        everywhere = loaded(llm)
        quantised = ask(llm, [prompt(30)])[0]
    with engine(path, kv_cache_dtype_skip_layers=["1"]) as llm:
        layers = attention_layers(llm)
        assert [layer.kv_cache_dtype for layer in layers] == [
            "fp8_inc",
            "auto",
            "fp8_inc",
        ]
        for n in (0, 2):
            scales = layers[n].impl.scales
            assert scales.k.dequant_scale.item() == everywhere[n]["k"]
        mixed = ask(llm, [prompt(30)])[0]
    # A bf16 cache in one layer brings the model nearer to one in all.
    near = (mixed.prefill - plain.prefill).abs().mean()
    far = (quantised.prefill - plain.prefill).abs().mean()
    assert 0 < near < far


def test_scales_of_a_draft_model_in_the_checkpoint_are_not_the_models(tmp_path):
    scales = kv_scales(llama_config())
    more = {
        f"mtp.layers.{n}.self_attn.{role}_scale": torch.tensor([0.7 + n])
        for n in range(2)
        for role in "kv"
    }
    with engine(checkpoint(tmp_path, "gqa", scales | more)) as llm:
        found = loaded(llm)
    assert [layer["k"] for layer in found] == [
        acting(0.011 + 0.005 * n) for n in range(3)
    ]


def test_a_state_without_scales_stops_the_start(tmp_path):
    first = checkpoint(tmp_path / "first", "gqa")
    saved = tmp_path / "saved"
    saved.mkdir()
    shutil.copy(tmp_path / "first" / "config.json", saved)
    with engine(first, kv_cache_dtype_skip_layers=["1"]) as llm:
        llm.collective_rpc("save_sharded_state", kwargs={"path": str(saved)})
    with (
        pytest.raises(ValueError) as caught,
        engine(str(saved), load_format="sharded_state"),
    ):
        pass
    assert "layers.1.self_attn.attn.fp8_inc_amax" in str(caught.value)


def test_a_draft_model_has_scales_of_its_own(tmp_path):
    target = checkpoint(tmp_path / "target", "gqa")
    scales = {key: 3.3 * scale for key, scale in kv_scales(llama_config()).items()}
    draft = checkpoint(tmp_path / "draft", "gqa", scales)
    options = {"model": draft, "method": "draft_model", "num_speculative_tokens": 2}
    with engine(target) as llm:
        alone, own = ask(llm, [prompt(30)])[0], loaded(llm)
    with engine(target, speculative_config=options) as llm:
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        layers = [
            module
            for module in runner.drafter.model.modules()
            if hasattr(module, "kv_cache_dtype")
        ]
        assert loaded(llm) == own
        for n, layer in enumerate(layers):
            expected = acting(3.3 * (0.011 + 0.005 * n))
            assert layer.impl.scales.k.dequant_scale.item() == expected
        assert len(layers) == 3
        answer = ask(llm, [prompt(30)])[0]
    assert answer.tokens == alone.tokens


def test_layers_that_share_a_cache_have_the_scales_of_its_owner(tmp_path, caplog_vllm):
    config = Gemma3nTextConfig(
        vocab_size=128,
        vocab_size_per_layer_input=128,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        altup_num_inputs=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    Gemma3nForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    unused = {
        f"model.layers.{n}.self_attn.k_norm.weight": torch.ones(32).bfloat16()
        for n in (2, 3)
    }
    first, second = add_scales(tmp_path, [0, 1], unused)
    with engine(str(tmp_path)) as llm:
        assert loaded(llm) == [first, second, first, second]
        shared = attention_layers(llm)[2].impl.scales.source
    assert shared == "those of model.layers.0.self_attn.attn"
    assert "KV scales of 4 of 4 layers" in caplog_vllm.text
    assert "(2 layers share the cache of another)" in caplog_vllm.text


def test_layers_without_a_kv_cache_need_no_scales(tmp_path, caplog_vllm):
    config = Lfm2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        max_position_embeddings=256,
        conv_dim=64,
        block_dim=64,
        block_multiple_of=32,
        block_auto_adjust_ff_dim=False,
        block_ffn_dim_multiplier=1.0,
    )
    torch.manual_seed(0)
    Lfm2ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    expected = add_scales(tmp_path, [1, 3])
    with engine(str(tmp_path)) as llm:
        found = [layer.impl.scales for layer in attention_layers(llm)]
        ask(llm, [prompt(30)])
    for scales, wanted in zip(found, expected, strict=True):
        assert scales.k.dequant_scale.item() == wanted["k"]
        assert scales.v.dequant_scale.item() == wanted["v"]
    assert "KV scales of 2 of 2 layers" in caplog_vllm.text
