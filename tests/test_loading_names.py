# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a real engine says of towers, shards, and scales nobody calibrated."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import (
    checkpoint,
    kv_scales,
    llama_config,
    quantization_config,
    weights,
    write,
)
from tests.engines import acting, engine, loaded

LAYER = "model.layers.1.self_attn"


def test_scales_of_a_tower_are_ignored_with_one_line(tmp_path, caplog_vllm):
    key = "vision_tower.encoder.layers.{}.self_attn.k_scale"
    tower = {key.format(n): torch.tensor([0.3]) for n in (0, 9)}
    with engine(checkpoint(tmp_path, "gqa", kv_scales(llama_config()) | tower)) as llm:
        assert [layer["k"] for layer in loaded(llm)] == [
            acting(0.011 + 0.005 * n) for n in range(3)
        ]
    lines = [line for line in caplog_vllm.messages if "audio tower" in line]
    assert len(lines) == 1
    assert "2 scales" in lines[0] and key.format(0) in lines[0]


def sharded(folder: Path, second: dict[str, torch.Tensor], listed: bool) -> str:
    """A GQA checkpoint whose second shard may be missing in the index."""
    config = llama_config()
    config["quantization_config"] = quantization_config(config_groups={})
    scales = kv_scales(config)
    for key in second:
        if not listed:
            scales.pop(key, None)
    first = weights(config) | scales
    path = write(folder, config, first)
    save_file(second, folder / "second.safetensors", metadata={"format": "pt"})
    names = dict.fromkeys(first, "model.safetensors")
    names |= dict.fromkeys(second, "second.safetensors") if listed else {}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


@pytest.mark.parametrize("role", ["k", "q"])
def test_a_shard_that_the_index_does_not_name_stops_the_start(tmp_path, role):
    key = f"{LAYER}.{role}_scale"
    path = sharded(tmp_path, {key: torch.tensor([0.2])}, listed=False)
    with pytest.raises(ValueError) as caught, engine(path):
        pass
    assert "does not name this file" in str(caught.value)
    for part in (str(tmp_path / "second.safetensors"), key, "weight_map"):
        assert part in str(caught.value)


def test_an_unlisted_shard_with_nothing_new_is_left_alone(tmp_path):
    """A folder may hold the model a second time, in Mistral's names."""
    config = llama_config()
    config["quantization_config"] = quantization_config(config_groups={})
    path = write(tmp_path, config, weights(config) | kv_scales(config))
    names = dict.fromkeys(weights(config) | kv_scales(config), "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    key = "layers.1.attention.kv_fake_quantizer.qscale_act"
    save_file({key: torch.tensor(0.2)}, tmp_path / "consolidated.safetensors")
    # "auto" would load the consolidated file and nothing else.
    with engine(path, load_format="safetensors") as llm:
        assert loaded(llm)[1]["k"] == acting(0.016)


@pytest.mark.parametrize("value", [0.016, 0.2])
def test_a_key_in_two_shards_must_have_one_value(tmp_path, value):
    key = f"{LAYER}.k_scale"
    path = sharded(tmp_path, {key: torch.tensor([value])}, listed=True)
    if value == 0.016:
        with engine(path) as llm:
            assert loaded(llm)[1]["k"] == acting(0.016)
        return
    with pytest.raises(ValueError, match="is there twice") as caught, engine(path):
        pass
    for part in (key, "0.0160000", "0.2000000", "model.safetensors", "second.safe"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "value, message", [(1.0, "exactly 1.0 in 3 of 3"), (0.02, "all 3 layers have the")]
)
def test_scales_that_no_calibration_gives_are_pointed_out_once(
    tmp_path, caplog_vllm, value, message
):
    scales = dict.fromkeys(kv_scales(llama_config()), torch.tensor([value]))
    scales = {key: scale.clone() for key, scale in scales.items()}
    with engine(checkpoint(tmp_path, "gqa", scales)) as llm:
        llm.collective_rpc("reload_weights")
    lines = [line for line in caplog_vllm.messages if message in line]
    assert len(lines) == 1


def test_missing_scales_are_named_as_the_checkpoint_names_the_others(tmp_path):
    config = llama_config()
    key = "transformer.layers.{}.attention.kv_cache_scaling_factor"
    scales = {key.format(n): torch.tensor([0.1 + n]) for n in (0, 2)}
    path = write(tmp_path, config, weights(config) | scales)
    with pytest.raises(ValueError) as caught, engine(path):
        pass
    assert f"{path}: {key.format(1)} missing" in str(caught.value)


def test_the_old_compression_config_declares_too(tmp_path):
    config = llama_config()
    config["compression_config"] = quantization_config(config_groups={})
    path = write(tmp_path, config, weights(config))
    with pytest.raises(ValueError, match="kv_cache_scheme"), engine(path):
        pass
