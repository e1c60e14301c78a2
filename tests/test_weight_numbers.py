# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Engines in float32 on FP8 weights of every kind, against transformers.

Why medians are compared: median_distance in test_mla_numbers.py. That they catch a
wrong scale or rounding shows the second test.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import (
    deepseek_config,
    fp8_config,
    kv_scales,
    quantization_config,
    quantize,
    quantize_blocks,
    weights,
    write,
)
from tests.oracle import Oracle
from tests.test_mla_numbers import (
    LATENT,
    MEDIAN_BOUND,
    SHORT_PROMPTS,
    answers,
    device,
    median_distance,
)
from tests.weight_oracle import WeightOracle, fake_quantize, requantize_blocks, widen

# Neither of the fused projections, nor the experts, nor the latent with its rope
# fill their last block.
BLOCK_SIZES = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "moe_intermediate_size": 160,
    "kv_lora_rank": 128,
}
BLOCK = {"weight_block_size": [128, 128], "fmt": "e4m3"}
DEVICES = pytest.mark.parametrize(
    "served, maximum",
    [pytest.param("gaudi2", 240.0, marks=pytest.mark.slow), ("gaudi3", 448.0)],
)


def channel_token(folder: Path) -> str:
    """compressed-tensors: weights per channel, activations per token."""
    config = deepseek_config()
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": args | {"strategy": "channel", "dynamic": False},
        "input_activations": args | {"strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = quantization_config(
        config_groups={"group_0": scheme}
    )
    tensors = quantize(weights(config), per_channel=True, static=False)
    return write(folder, config, tensors | kv_scales(config))


def compressed_blocks(folder: Path) -> str:
    """compressed-tensors: 128x128 blocks, activations in groups of 128."""
    config = deepseek_config(**BLOCK_SIZES)
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": args
        | {"strategy": "block", "block_structure": [128, 128], "dynamic": False},
        "input_activations": args
        | {"strategy": "group", "group_size": 128, "dynamic": True},
    }
    config["quantization_config"] = quantization_config(
        config_groups={"group_0": scheme}
    )
    tensors = quantize_blocks(weights(config))
    tensors = {n.replace("_scale_inv", "_scale"): t for n, t in tensors.items()}
    return write(folder, config, tensors | kv_scales(config))


def tensor_dynamic(folder: Path) -> str:
    """compressed-tensors: weights and dynamic activations per tensor."""
    config = deepseek_config()
    groups = quantization_config()["config_groups"]
    groups["group_0"]["input_activations"]["dynamic"] = True
    config["quantization_config"] = quantization_config(config_groups=groups)
    tensors = quantize(weights(config), static=False)
    return write(folder, config, tensors | kv_scales(config))


def fp8_tensor(folder: Path, static: bool, **quantization: Any) -> str:
    """AutoFP8: weights per tensor."""
    config = deepseek_config()
    config["quantization_config"] = fp8_config(static, **quantization)
    tensors = quantize(weights(config), static=static)
    return write(folder, config, tensors | kv_scales(config))


def fp8_static(folder: Path) -> str:
    return fp8_tensor(folder, static=True)


def fp8_dynamic(folder: Path) -> str:
    return fp8_tensor(folder, static=False)


def fp8_block(folder: Path, **sizes: Any) -> str:
    """The official DeepSeek checkpoints."""
    config = deepseek_config(**BLOCK_SIZES | sizes)
    config["quantization_config"] = fp8_config(**BLOCK)
    tensors = quantize_blocks(weights(config))
    return write(folder, config, tensors | kv_scales(config))


def fp8_block_q_lora(folder: Path) -> str:
    """As DeepSeek-V3, whose q_a_proj and kv_a_proj_with_mqa are fused."""
    return fp8_block(folder, q_lora_rank=128)


@DEVICES
@pytest.mark.parametrize(
    "checkpoint",
    [
        channel_token,
        tensor_dynamic,
        compressed_blocks,
        fp8_static,
        fp8_dynamic,
        fp8_block,
        fp8_block_q_lora,
    ],
)
def test_mla_and_experts_equal_transformers(tmp_path, checkpoint, served, maximum):
    path = checkpoint(tmp_path)
    factor = 448 / maximum
    oracle = Oracle(path, [s * factor for s in LATENT], maximum, factor)
    served_answers = answers(path, SHORT_PROMPTS, **device(served))
    assert median_distance(served_answers, oracle) < MEDIAN_BOUND


def without_dynamic(oracle: WeightOracle) -> None:
    oracle.dynamic.clear()


def one_scale_for_all_tokens(oracle: WeightOracle) -> None:
    oracle.input = lambda x, names: (
        fake_quantize(x, x.abs().max().item() / 448, 448.0)
        if oracle.dynamic.issuperset(names)
        else x
    )


def blocks_as_they_are(oracle: WeightOracle) -> None:
    oracle.requantize = lambda codes, scale: (
        codes.float() * torch.from_numpy(widen(scale.numpy(), *codes.shape))
    )


def blocks_flipped(oracle: WeightOracle) -> None:
    oracle.requantize = lambda codes, scale: requantize_blocks(
        codes, scale.flip(0, 1), oracle.maximum
    )


@pytest.mark.parametrize(
    "checkpoint, wrong",
    [
        (channel_token, without_dynamic),
        (channel_token, one_scale_for_all_tokens),
        (fp8_block, without_dynamic),
        (fp8_block, blocks_as_they_are),
        (fp8_block, blocks_flipped),
    ],
)
def test_the_bound_catches(tmp_path, checkpoint, wrong):
    path = checkpoint(tmp_path)
    oracle = Oracle(path, LATENT, wrong=wrong)
    distance = median_distance(answers(path, SHORT_PROMPTS), oracle)
    assert distance > 20 * MEDIAN_BOUND
