# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MLA engines in float32 against transformers, log-probability by log-probability.

In float32 nothing but FP8 rounds, so engine and oracle differ by some 1e-6. Two orders
of summation may round an activation that lies on a tie to different neighbours, which
moves the position by some 1e-3: hence a bound on the mean over the positions. It is far
below what any wrong scale does, as the last test shows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import (
    DEEPSEEK_YARN,
    deepseek_config,
    kv_scales,
    quantization_config,
    quantize,
    weights,
    write,
)
from tests.engines import Answer, ask, engine, prompt
from tests.oracle import Oracle

BOUND = 2e-3
MEDIAN_BOUND = 1e-4
PROMPTS = [prompt(50), prompt(23, seed=5)]
SHORT_PROMPTS = [prompt(12, seed) for seed in range(9)]
# k_scale < v_scale in every layer of kv_scales: the latent takes v's.
LATENT = [0.031 + 0.007 * n for n in range(3)]
K_ONLY = [0.011 + 0.005 * n for n in range(3)]


def kv_only(folder: Path, **changes: Any) -> str:
    """bf16 weights, KV scales."""
    quantization = changes.pop("quantization", {})
    config = deepseek_config(**changes)
    config["quantization_config"] = quantization_config(
        config_groups={}, **quantization
    )
    return write(folder, config, weights(config) | kv_scales(config))


def fp8_static(folder: Path, maximum: float = 448.0, **quantization: Any) -> str:
    """FP8-static weights, KV scales."""
    config = deepseek_config()
    config["quantization_config"] = quantization_config(**quantization)
    tensors = quantize(weights(config), maximum)
    return write(folder, config, tensors | kv_scales(config))


def device(name: str) -> dict[str, Any]:
    return {"additional_config": {"fp8_inc": {"device": name}}}


def answers(
    path: str, prompts: list[list[int]] = PROMPTS, **options: Any
) -> list[Answer]:
    with engine(path, dtype="float32", **options) as llm:
        return ask(llm, prompts)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean absolute difference of log-probabilities."""
    return (one - other).abs().mean().item()


def prefill_distance(answer: Answer, oracle: Oracle) -> float:
    return distance(
        answer.prefill, oracle.logprobs(answer.tokens)[: answer.prompt_tokens]
    )


def median_distance(answers: list[Answer], oracle: Oracle) -> float:
    """Median over the positions of many short prompts, of what the prefill computed.

    For quantised activations: a thousand times as many values are rounded as in the
    cache, so that some lie on a tie in every run, and one that falls to the other side
    moves every later position of its prompt. A wrong scale moves all positions.
    """
    distances = [
        (a.prefill - oracle.logprobs(a.tokens)[: a.prompt_tokens]).abs()
        for a in answers
    ]
    return torch.cat(distances).median().item()


@pytest.mark.parametrize("rope", [None, DEEPSEEK_YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("cache", ["fp8_inc", "auto"])
def test_prefill_and_decode_equal_transformers(tmp_path, rope, cache):
    path = kv_only(tmp_path, rope_scaling=rope)
    oracle = Oracle(path, LATENT if cache == "fp8_inc" else None)
    for answer in answers(path, kv_cache_dtype=cache):
        assert prefill_distance(answer, oracle) < BOUND
        expected = oracle.logprobs(answer.tokens)[answer.prompt_tokens :]
        assert distance(answer.decode, expected) < BOUND


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_lora_rank": 48, "qk_rope_head_dim": 16},
        {"kv_lora_rank": 160, "qk_rope_head_dim": 64, "v_head_dim": 48},
        {"q_lora_rank": 24, "num_attention_heads": 2, "num_key_value_heads": 2},
    ],
    ids=["small", "wide", "q_lora"],
)
@pytest.mark.parametrize(
    "block_size",
    [16, *(pytest.param(n, marks=pytest.mark.slow) for n in (48, 128))],
)
def test_any_latent_and_block_size(tmp_path, sizes, block_size):
    path = kv_only(tmp_path, **sizes)
    oracle = Oracle(path, LATENT)
    for answer in answers(path, block_size=block_size):
        assert prefill_distance(answer, oracle) < BOUND


@pytest.mark.parametrize(
    "served, flavor, maximum, factor",
    [
        ("gaudi2", "float8_e4m3fnuz", 240.0, 1),
        ("gaudi2", "float8_e4m3fn", 240.0, 448 / 240),
        ("gaudi3", "float8_e4m3fn", 448.0, 1),
        ("gaudi3", "float8_e4m3fnuz", 448.0, 240 / 448),
    ],
)
def test_fp8_static_weights_on_both_devices(tmp_path, served, flavor, maximum, factor):
    made_for = 240.0 if flavor.endswith("fnuz") else 448.0
    path = fp8_static(tmp_path, made_for, fp8_dtype_flavor=flavor)
    oracle = Oracle(path, [s * factor for s in LATENT], maximum, factor)
    served_answers = answers(path, SHORT_PROMPTS, **device(served))
    assert median_distance(served_answers, oracle) < MEDIAN_BOUND


@pytest.mark.parametrize(
    "cache", ["fp8_inc", pytest.param("auto", marks=pytest.mark.slow)]
)
def test_chunks_and_prefix_hits_change_nothing(tmp_path, cache):
    path = kv_only(tmp_path)
    whole = answers(path, kv_cache_dtype=cache, enable_prefix_caching=False)
    chunked = answers(
        path,
        kv_cache_dtype=cache,
        enable_prefix_caching=False,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    for one, other in zip(whole, chunked, strict=True):
        assert one.generated == other.generated
        assert distance(one.logprobs, other.logprobs) < BOUND
    with engine(path, dtype="float32", kv_cache_dtype=cache, block_size=16) as llm:
        ask(llm, PROMPTS)
        for one, again in zip(whole, generate(llm), strict=True):
            assert again.cached > 0
            assert one.generated == again.tokens


class Hit:
    """Tokens of a second run, and how many of its prompt came from the cache."""

    def __init__(self, result: Any) -> None:
        self.tokens = list(result.outputs[0].token_ids)
        self.cached = result.num_cached_tokens


def generate(llm: Any) -> list[Hit]:
    """As ask, but without prompt log-probabilities, which switch hits off."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=8, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    return [Hit(r) for r in llm.generate(prompts, parameters, use_tqdm=False)]


@pytest.fixture(scope="module")
def right_answers(tmp_path_factory):
    path = kv_only(tmp_path_factory.mktemp("right"))
    return path, answers(path)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"latent_scales": K_ONLY}, id="k instead of the larger"),
        pytest.param({"latent_scales": [1.0] * 3}, id="1.0 instead of the scale"),
        pytest.param({"latent_scales": LATENT[::-1]}, id="layers swapped"),
        pytest.param(
            {"latent_scales": [s * 448 / 240 for s in LATENT], "maximum": 240.0},
            id="240 for 448",
        ),
        pytest.param({"latent_scales": None}, id="not quantised"),
    ],
)
def test_the_bound_catches(right_answers, wrong):
    path, found = right_answers
    right = Oracle(path, LATENT)
    for answer in found:
        assert prefill_distance(answer, right) < BOUND
        assert prefill_distance(answer, Oracle(path, **wrong)) > 20 * BOUND
