# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Each rank of a parallel engine has the scales of its layers and heads."""

import pytest
import torch

from tests.checkpoints import (
    checkpoint,
    deepseek_config,
    kv_scales,
    llama_config,
    quantization_config,
    weights,
    write,
)
from tests.engines import ask, engine, prompt

pytestmark = pytest.mark.slow

SCHEME = quantization_config()["kv_cache_scheme"] | {"strategy": "attn_head"}


def scales_of_rank(worker) -> dict[str, dict[str, list[float]]]:
    """Layer name -> role -> dequant scales; runs inside a worker."""
    return {
        module.layer_name: {
            role: getattr(scales, role).dequant_scale.flatten().tolist()
            for role in ("k", "v", "q")
            if getattr(scales, role)
        }
        for module in worker.get_model().modules()
        if (scales := getattr(getattr(module, "impl", None), "scales", None))
    }


@pytest.fixture(autouse=True)
def _two_workers_on_few_cores(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def acting(dequant_scale: float) -> float:
    """The dequant scale that acts in a float32 model."""
    return torch.tensor(dequant_scale).reciprocal().reciprocal().item()


def two_ranks(path: str, **options):
    with engine(path, dtype="float32", **options) as llm:
        return llm.collective_rpc(scales_of_rank), ask(llm, [prompt(30)])[0]


def value(role: str, n: int, head: int) -> float:
    return {"k": 0.011, "v": 0.031, "q": 0.023}[role] * (1 + 0.3 * n + 0.17 * head)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_tensor_parallel_ranks_share_the_heads(tmp_path, kv_heads):
    config = llama_config(num_key_value_heads=kv_heads)
    config["quantization_config"] = quantization_config(
        config_groups={}, kv_cache_scheme=SCHEME
    )
    heads = {"k": kv_heads, "v": kv_heads, "q": 4}
    scales = {
        f"model.layers.{n}.self_attn.{role}_scale": torch.tensor(
            [value(role, n, head) for head in range(count)]
        )[:, None, None]
        for n in range(3)
        for role, count in heads.items()
    }
    path = write(tmp_path, config, weights(config) | scales)
    ranks, answer = two_ranks(path, tensor_parallel_size=2)
    for rank, layers in enumerate(ranks):
        assert len(layers) == 3
        for n, layer in enumerate(layers.values()):
            for role, count in heads.items():
                local = max(1, count // 2)
                first = rank * count // 2
                assert layer[role] == [
                    acting(value(role, n, head)) for head in range(first, first + local)
                ]
    with engine(path, dtype="float32") as llm:
        alone = ask(llm, [prompt(30)])[0]
    # Not the mean: sums of another order round to other FP8 codes here and there.
    assert (answer.prefill - alone.prefill).abs().median() < 1e-4


def test_tensor_parallel_ranks_have_the_same_latent_scale(tmp_path):
    scales = kv_scales(deepseek_config())
    path = checkpoint(tmp_path, "mla", scales)
    ranks, _ = two_ranks(path, tensor_parallel_size=2)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 3
    for n, layer in enumerate(ranks[0].values()):
        expected = acting(scales[f"model.layers.{n}.self_attn.v_scale"].item())
        assert layer["k"] == layer["v"] == [expected]


def test_pipeline_parallel_ranks_have_the_scales_of_their_layers(tmp_path):
    scales = kv_scales(llama_config())
    path = checkpoint(tmp_path, "gqa", scales)
    with engine(path, dtype="float32", pipeline_parallel_size=2) as llm:
        ranks = llm.collective_rpc(scales_of_rank)
    names = [name for layers in ranks for name in layers]
    assert [len(layers) for layers in ranks] in ([1, 2], [2, 1])
    assert len(set(names)) == 3
    for layers in ranks:
        for name, layer in layers.items():
            key = f"{name.removesuffix('.attn')}.k_scale"
            assert layer["k"] == [acting(scales[key].item())]
