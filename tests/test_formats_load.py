# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Every producer's names load in a real engine, for MHA and for MLA."""

import json
from collections.abc import Iterator

import pytest
import torch

from tests.checkpoints import (
    deepseek_config,
    llama_config,
    quantization_config,
    weights,
    write,
)
from tests.engines import acting, attention_layers, engine
from vllm.fp8_inc.sources.producers import PRODUCERS, Producer, Tensor

BUILDERS = {"MHA": llama_config, "MLA": deepseek_config}
LAYERS = 3
BASE = {"k": 0.011, "v": 0.031, "q": 0.023, "q_latent": 0.047, "prob": 0.0021}
FUSED = 0.017
Tensors = dict[str, Tensor]


def value(tensor: Tensor, n: int) -> float:
    """Dequant scale of layer n: no two roles, no two layers have the same."""
    base = FUSED if len(tensor.roles) > 1 else BASE[tensor.roles[0]]
    return base * (1 + 0.3 * n)


def variants(row: Producer, kind: str) -> Iterator[Tensors]:
    """Splits a row into what one checkpoint holds: k and v one way, and the rest."""
    mine = {n: t for n, t in row.tensors.items() if t.only in (None, kind)}
    rest = {n: t for n, t in mine.items() if not {"k", "v"} & set(t.roles)}
    rest |= {n: t for n, t in mine.items() if t.use == "zero"}
    ways: dict[tuple[str, int, str], Tensors] = {}
    for name, tensor in mine.items():
        if name not in rest:
            parent = name.rpartition(".")[0] if "qkv" in name else ""
            way = ways.setdefault((tensor.use, len(tensor.roles), parent), {})
            way[name] = tensor
    for way in ways.values():
        yield way | rest


# Every row in one kind of model; in the other one at night.
CASES = [
    pytest.param(
        row,
        kind,
        tensors,
        id=f"{row.name}, {kind}, {next(iter(tensors))}",
        marks=[pytest.mark.slow] if kind == ("MHA", "MLA")[n % 2] else [],
    )
    for n, row in enumerate(PRODUCERS)
    for kind in BUILDERS
    for tensors in variants(row, kind)
]


def stored(tensor: Tensor, n: int) -> torch.Tensor:
    if tensor.use == "ignored":
        return torch.tensor([99.0 + n])
    if tensor.use == "zero":
        return torch.zeros(1)
    scale = value(tensor, n)
    return torch.tensor(1 / scale if tensor.use == "quant_scale" else scale)


@pytest.mark.parametrize("row, kind, tensors", CASES)
def test_every_producers_scales_reach_every_layer(
    tmp_path, caplog_vllm, row, kind, tensors
):
    config = BUILDERS[kind]()
    if row.quant_methods == ("compressed-tensors",):
        config["quantization_config"] = quantization_config(config_groups={})
        if row.provider:
            config["quantization_config"]["provider"] = row.provider
    scales = {
        f"{row.module.replace('N', str(n))}.{name}": stored(tensor, n)
        for n in range(LAYERS)
        for name, tensor in tensors.items()
    }
    path = write(tmp_path, config, weights(config) | scales)
    with engine(path) as llm:
        found = [layer.impl.scales for layer in attention_layers(llm)]
    assert len(found) == LAYERS
    for n, layer in enumerate(found):
        expected = dict.fromkeys(BASE)
        for tensor in tensors.values():
            if tensor.use.endswith("scale"):
                expected |= dict.fromkeys(tensor.roles, value(tensor, n))
        if kind == "MLA":
            expected["k"] = expected["v"] = max(expected["k"], expected["v"])
        for role, scale in expected.items():
            got = getattr(layer, role)
            assert (got and got.dequant_scale.item()) == (scale and acting(scale)), role
        assert row.name in layer.source
    assert f"3 of 3 layers from {found[0].source}" in caplog_vllm.text
    assert not [line for line in caplog_vllm.messages if "have the same" in line]


def legacy_json(folder, scales: dict[str, dict[str, float]], **changes) -> dict:
    """Writes the file and returns the engine option that names it."""
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": scales} | changes
    path = folder / "kv_cache_scales.json"
    path.write_text(json.dumps({"model_type": None, "kv_cache": cache}))
    return {"additional_config": {"fp8_inc": {"legacy_scales": str(path)}}}


@pytest.mark.parametrize("with_scales", [False, True])
@pytest.mark.parametrize("kind", BUILDERS)
def test_the_legacy_json_replaces_the_checkpoints_scales(
    tmp_path, caplog_vllm, kind, with_scales
):
    config = BUILDERS[kind]()
    tensors = weights(config)
    if with_scales:
        config["quantization_config"] = quantization_config(config_groups={})
        for n in range(LAYERS):
            for role in "kvq":
                key = f"model.layers.{n}.self_attn.{role}_scale"
                tensors[key] = torch.tensor(0.7 + n)
    path = write(tmp_path, config, tensors)
    values = {str(n): 0.013 + 0.004 * n for n in range(LAYERS)}
    with engine(path, **legacy_json(tmp_path, {"0": values})) as llm:
        found = [layer.impl.scales for layer in attention_layers(llm)]
    for n, layer in enumerate(found):
        scale = acting(values[str(n)])
        assert layer.k.dequant_scale.item() == layer.v.dequant_scale.item() == scale
        assert layer.q is None
    assert "kv_cache_scales.json (rank 0 of 1)" in caplog_vllm.text
    replaced = "legacy_scales replaces 9 scales of the checkpoint"
    assert (replaced in caplog_vllm.text) == with_scales


def test_a_legacy_json_of_two_ranks_and_another_flavour(tmp_path, caplog_vllm):
    config = llama_config()
    config["quantization_config"] = quantization_config(
        config_groups={}, fp8_dtype_flavor="float8_e4m3fn"
    )
    path = write(tmp_path, config, weights(config))
    ranks = {
        "0": {"0": 0.01, "1": 0.05, "2": 0.03},
        "1": {"0": 0.02, "1": 0.04, "2": 0.06},
    }
    options = legacy_json(tmp_path, ranks, dtype="float8_e4m3fnuz")
    with engine(path, **options) as llm:
        found = [layer.impl.scales for layer in attention_layers(llm)]
    expected = [acting(value * 240 / 448) for value in (0.02, 0.05, 0.06)]
    assert [layer.k.dequant_scale.item() for layer in found] == expected
    assert "the largest of ranks [0, 1], served on 1" in caplog_vllm.text


@pytest.mark.parametrize(
    "layers, message",
    [
        (range(2), "kv_cache.scaling_factor.*.2"),
        (range(4), "kv_cache.scaling_factor.*.3 belongs to no attention layer"),
    ],
)
def test_a_legacy_json_of_another_model_stops_the_start(tmp_path, layers, message):
    config = llama_config()
    path = write(tmp_path, config, weights(config))
    options = legacy_json(tmp_path, {"0": {str(n): 0.1 + n for n in layers}})
    with pytest.raises(ValueError) as caught, engine(path, **options):
        pass
    assert message in str(caught.value)
    assert "kv_cache_scales.json" in str(caught.value)
