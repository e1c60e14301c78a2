# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales per head load in a real engine; test_gqa_numbers.py tests what they do."""

import pytest
import torch

from tests.checkpoints import checkpoint, quantization_config
from tests.engines import acting, attention_layers, engine

SCHEME = quantization_config()["kv_cache_scheme"] | {"strategy": "attn_head"}
HEADS = {"k": 2, "v": 2, "q": 4}
FACTOR = {"k": 0.011, "v": 0.031, "q": 0.023}


def values(role: str, n: int, heads: int) -> list[float]:
    return [FACTOR[role] * (1 + 0.3 * n + 0.17 * head) for head in range(heads)]


def scales(shape: list[int], heads: dict[str, int] = HEADS) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{n}.self_attn.{role}_scale": torch.tensor(
            values(role, n, count)
        ).view(shape)
        for n in range(3)
        for role, count in heads.items()
    }


@pytest.mark.parametrize("shape", [[-1], [-1, 1, 1], [1, -1, 1]], ids=str)
def test_every_head_gets_its_own_scale(tmp_path, caplog_vllm, shape):
    path = checkpoint(tmp_path, "gqa", scales(shape), kv_cache_scheme=SCHEME)
    with engine(path) as llm:
        found = [layer.impl.scales for layer in attention_layers(llm)]
    for n, layer in enumerate(found):
        for role, heads in HEADS.items():
            expected = [acting(value) for value in values(role, n, heads)]
            assert getattr(layer, role).dequant_scale.tolist() == expected
    assert " per head; q loaded" in caplog_vllm.text


def test_mla_takes_the_largest_of_all_heads(tmp_path, caplog_vllm):
    heads = {"k": 4, "v": 4, "q": 4}
    path = checkpoint(tmp_path, "mla", scales([-1], heads), kv_cache_scheme=SCHEME)
    with engine(path) as llm:
        found = [layer.impl.scales for layer in attention_layers(llm)]
    for n, layer in enumerate(found):
        expected = acting(max(values("v", n, 4)))
        assert layer.k.dequant_scale.item() == layer.v.dequant_scale.item() == expected
        assert layer.q.dequant_scale.shape == (4,)
    said = "the larger of k and v, and of all heads, for the latent"
    assert said in caplog_vllm.text


def test_a_length_unlike_the_heads_stops_the_start(tmp_path):
    path = checkpoint(
        tmp_path, "gqa", scales([-1], HEADS | {"k": 3}), kv_cache_scheme=SCHEME
    )
    with pytest.raises(ValueError) as caught, engine(path):
        pass
    key = "model.layers.0.self_attn.k_scale"
    for part in ("model.safetensors", key, "3 scales", "2 heads"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "provider, factor", [("auto-round", 448 / 240), ("llm-compressor", 1.0)]
)
def test_scales_per_head_of_autoround_divide_by_448(
    tmp_path, caplog_vllm, provider, factor
):
    path = checkpoint(
        tmp_path,
        "gqa",
        scales([-1], {"k": 2}) | scales([-1], {"v": 1}),
        kv_cache_scheme=SCHEME,
        fp8_dtype_flavor="float8_e4m3fnuz",
        provider=provider,
    )
    options = {"additional_config": {"fp8_inc": {"device": "gaudi2"}}}
    with engine(path, **options) as llm:
        found = [layer.impl.scales for layer in attention_layers(llm)]
    for n, layer in enumerate(found):
        per_head = [acting(value * factor) for value in values("k", n, 2)]
        assert layer.k.dequant_scale.tolist() == per_head
        # One scale for all heads divides by what the flavour says.
        assert layer.v.dequant_scale.item() == acting(values("v", n, 1)[0])
    said = "scales per head of AutoRound divide by 448" in caplog_vllm.text
    assert said == (provider == "auto-round")
