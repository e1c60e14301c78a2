# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A GQA engine in float32 against transformers' Llama with fake-quantised K and V.

With our own reader, which every CPU has; tests/attention/test_mha_cpu.py compares it
with upstream's where the machine has that.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from tests.checkpoints import (
    fp8_config,
    kv_scales,
    llama_config,
    quantization_config,
    quantize,
    quantize_blocks,
    weights,
    write,
)
from tests.engines import ask, engine, prompt
from tests.weight_oracle import WeightOracle, fake_quantize
from vllm.fp8_inc.attention import mha_cpu

BOUND = 2e-3  # as in test_mla_numbers.py
K = [0.011 + 0.005 * n for n in range(3)]
PROMPTS = [prompt(50), prompt(23, seed=5)]
FUSED = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
V = [0.031 + 0.007 * n for n in range(3)]


@torch.no_grad()
def expected(config, tensors, tokens, k_scales, v_scales, maximum):
    """log P of each token, by transformers."""
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    checkpoint = WeightOracle(tensors, maximum, 448 / maximum)
    model.load_state_dict(checkpoint.plain)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            parent, _, leaf = name.rpartition(".")
            parts = next((parts for parts in FUSED if leaf in parts), [leaf])
            names = [f"{parent}.{part}" if parent else part for part in parts]
            checkpoint.hook(module, names)
    model.float()
    scales = iter(k_scales)
    rotate = modeling_llama.apply_rotary_pos_emb

    def quantized(*args, **kwargs):
        q, k = rotate(*args, **kwargs)
        return q, fake_quantize(k, next(scales), maximum)

    for layer, scale in zip(model.model.layers, v_scales, strict=True):
        layer.self_attn.v_proj.register_forward_hook(
            lambda _, __, out, s=scale: fake_quantize(out, s, maximum)
        )
    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", quantized):
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Config, weights and the answers of an engine on Gaudi2's or Gaudi3's numbers."""
    monkeypatch.setattr(mha_cpu, "upstream_reads", lambda *_: False)

    def serve(
        device,
        quantization=None,
        quantize=lambda tensors: tensors,
        prompts=PROMPTS,
        scales=kv_scales,
        **options,
    ):
        config = llama_config()
        tensors = quantize(weights(config))
        quantization = quantization or quantization_config(config_groups={})
        path = write(
            tmp_path,
            config | {"quantization_config": quantization},
            tensors | scales(config),
        )
        extra = {"fp8_inc": {"device": device}}
        with engine(path, dtype="float32", additional_config=extra, **options) as llm:
            return config, tensors, ask(llm, prompts)

    return serve


def distance(one, other):
    return (one - other).abs().mean().item()


@pytest.mark.parametrize("device, maximum", [("gaudi2", 240.0), ("gaudi3", 448.0)])
@pytest.mark.parametrize(
    "block_size", [16, pytest.param(48, marks=pytest.mark.slow), 128]
)
def test_equals_transformers(served, device, maximum, block_size):
    config, tensors, answers = served(device, block_size=block_size)
    factor = 448 / maximum
    for answer in answers:
        scales = [s * factor for s in K], [s * factor for s in V]
        oracle = expected(config, tensors, answer.tokens, *scales, maximum)
        assert distance(answer.logprobs, oracle) < BOUND


def scales_per_head(config):
    """Of the two KV heads: no two roles, layers or heads have the same."""
    scales = {}
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}.self_attn"
        scales[f"{layer}.k_scale"] = torch.tensor([K[n], 3.1 * K[n]])[:, None, None]
        scales[f"{layer}.v_scale"] = torch.tensor([2.3 * V[n], V[n]])[:, None, None]
    return scales


@pytest.mark.parametrize("device, maximum", [("gaudi2", 240.0), ("gaudi3", 448.0)])
def test_scales_per_head_equal_transformers(served, device, maximum):
    scheme = quantization_config()["kv_cache_scheme"] | {"strategy": "attn_head"}
    quantization = quantization_config(config_groups={}, kv_cache_scheme=scheme)
    config, tensors, answers = served(device, quantization, scales=scales_per_head)
    found = scales_per_head(config)
    factor = 448 / maximum
    k = [found[f"model.layers.{n}.self_attn.k_scale"] * factor for n in range(3)]
    v = [
        found[f"model.layers.{n}.self_attn.v_scale"].flatten() * factor
        for n in range(3)
    ]
    # transformers: k [1, heads, tokens, size], v [1, tokens, heads * size].
    v_wide = [scale.repeat_interleave(config["head_dim"]) for scale in v]
    largest = [scale.max() for scale in k], [scale.max() for scale in v]
    for answer in answers:
        tokens = answer.tokens
        right = expected(config, tensors, tokens, k, v_wide, maximum)
        assert distance(answer.logprobs, right) < BOUND
        swapped = [scale.flip(0) for scale in k]
        for wrong in [(swapped, v_wide), largest]:
            other = expected(config, tensors, tokens, *wrong, maximum)
            assert distance(answer.logprobs, other) > 2 * BOUND


@pytest.mark.parametrize(
    "device, maximum",
    [pytest.param("gaudi2", 240.0, marks=pytest.mark.slow), ("gaudi3", 448.0)],
)
@pytest.mark.parametrize(
    "quantization, quantize",
    [
        pytest.param(fp8_config(True), quantize, id="static"),
        pytest.param(fp8_config(), partial(quantize, static=False), id="dynamic"),
        pytest.param(
            fp8_config(weight_block_size=[128, 128]), quantize_blocks, id="block"
        ),
    ],
)
def test_fp8_checkpoints_equal_transformers(
    served, device, maximum, quantization, quantize
):
    prompts = [prompt(12, seed) for seed in range(9)]
    config, tensors, answers = served(device, quantization, quantize, prompts)
    factor = 448 / maximum
    scales = [s * factor for s in K], [s * factor for s in V]
    distances = [
        (a.logprobs - expected(config, tensors, a.tokens, *scales, maximum)).abs()
        for a in answers
    ]
    # Not the mean: see median_distance in test_mla_numbers.py.
    assert torch.cat(distances).median() < 1e-4


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((V, K, 448.0), id="k and v swapped"),
        pytest.param((K, K, 448.0), id="k for v"),
        pytest.param(([1.0] * 3, [1.0] * 3, 448.0), id="1.0 instead of the scale"),
        pytest.param((K[::-1], V[::-1], 448.0), id="layers swapped"),
        pytest.param(
            ([s * 448 / 240 for s in K], [s * 448 / 240 for s in V], 240.0),
            id="240 for 448",
        ),
    ],
)
def test_the_bound_catches(served, wrong):
    config, tensors, answers = served("gaudi3")
    for answer in answers:
        oracle = expected(config, tensors, answer.tokens, *wrong)
        assert distance(answer.logprobs, oracle) > 10 * BOUND


def test_chunks_change_nothing(served):
    _, _, whole = served("gaudi3", enable_prefix_caching=False)
    _, _, chunked = served(
        "gaudi3", enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=4
    )
    for one, other in zip(whole, chunked, strict=True):
        assert one.generated == other.generated
        assert distance(one.logprobs, other.logprobs) < BOUND
