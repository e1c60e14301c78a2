# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Sizes of well-known models, computed by hand."""

import os
from pathlib import Path

import pytest

from vllm.fp8_inc.capacity import bytes_per_token, capacity_lines, tokens
from vllm.fp8_inc.sources.folder import Folder

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
}


def folder(tmp_path: Path, config: dict, weights: int) -> Folder:
    """Without weights: one file of their size, which takes no room."""
    path = tmp_path / "model.safetensors"
    path.touch()
    os.truncate(path, weights)
    found = Folder(tmp_path, config)
    found.__dict__["keys"] = {}
    return found


def test_bytes_a_token(tmp_path):
    """32 layers of K and V, 8 heads of 128; 61 layers of 512 + 64."""
    llama = folder(tmp_path, LLAMA_8B, 16 * 10**9)
    assert [bytes_per_token(llama, n) for n in (2, 1)] == [131_072, 65_536]
    # A card has a head of its own, or shares one that is there several times.
    assert [bytes_per_token(llama, 1, n) for n in (2, 8, 16)] == [32_768, 8192, 8192]
    deepseek = folder(tmp_path, DEEPSEEK_V3, 690 * 10**9)
    assert [bytes_per_token(deepseek, n) for n in (2, 1)] == [70_272, 35_136]
    assert bytes_per_token(deepseek, 1, 8) == 35_136


@pytest.mark.parametrize(
    "device, config, weights, cards, room, size",
    [
        ("gaudi2", LLAMA_8B, 16, 1, 86.4 - 16, 65_536),
        ("gaudi3", LLAMA_8B, 16, 1, 115.2 - 16, 65_536),
        ("gaudi2", LLAMA_8B, 141, 2, 86.4 - 70.5, 32_768),
        ("gaudi2", DEEPSEEK_V3, 690, 8, 86.4 - 86.25, 35_136),
        ("gaudi3", DEEPSEEK_V3, 690, 8, 115.2 - 86.25, 35_136),
    ],
)
def test_tokens_of_a_device(tmp_path, device, config, weights, cards, room, size):
    found = tokens(folder(tmp_path, config, weights * 10**9), device, 1)
    assert found == (cards, pytest.approx(room * 1e9 / size, abs=1))


def test_the_lines_name_sequences_up_to_the_model_s_context(tmp_path):
    lines = capacity_lines(folder(tmp_path, LLAMA_8B, 16 * 10**9))
    (fp8,) = [line for line in lines if "gaudi3 x 1, fp8_inc" in line]
    assert "at most 1,513,671 tokens" in fp8
    assert fp8.endswith("369 of 4,096, 46 of 32,768, 11 of 131,072")
    short = LLAMA_8B | {"max_position_embeddings": 2048}
    lines = capacity_lines(folder(tmp_path, short, 16 * 10**9))
    assert lines[-1].endswith(": 739 of 2,048")


def test_weights_that_eight_cards_do_not_hold(tmp_path):
    lines = capacity_lines(folder(tmp_path, DEEPSEEK_V3, 1400 * 10**9))
    assert "gaudi2: 8 cards do not hold the weights" in lines[2]


@pytest.mark.parametrize("name", ["num_attention_heads", "hidden_size"])
def test_what_config_json_lacks_is_named(tmp_path, name):
    config = {key: value for key, value in LLAMA_8B.items() if key != name}
    with pytest.raises(ValueError, match=f"config.json has no {name}"):
        bytes_per_token(folder(tmp_path, config, 0), 1)


def test_heads_of_no_size(tmp_path):
    config = LLAMA_8B | {"hidden_size": 16}
    with pytest.raises(ValueError, match="hidden_size 16 is smaller"):
        bytes_per_token(folder(tmp_path, config, 0), 1)
