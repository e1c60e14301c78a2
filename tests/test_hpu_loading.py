# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What differs on HPU when scales are loaded, without a worker."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.engines import acting
from tests.sources.inc import helpers
from vllm.fp8_inc import hpu_ops, hpu_worker, quant_config
from vllm.fp8_inc.attention.mha_hpu import MHAPieces
from vllm.fp8_inc.formats import GAUDI3
from vllm.fp8_inc.layer_scales import LayerScales
from vllm.fp8_inc.scales import AttentionScales, StaticScale, give_scales
from vllm.fp8_inc.settings import Settings
from vllm.fp8_inc.sources.store import FoundScale
from vllm.platforms import current_platform


@pytest.fixture
def on_hpu(monkeypatch):
    monkeypatch.setattr(current_platform, "device_name", "hpu")
    monkeypatch.delenv("QUANT_CONFIG", raising=False)


def layer() -> nn.Module:
    """An attention layer as a quantisation method of vLLM leaves it."""
    module = nn.Module()
    module.quant_method = object()
    for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
        setattr(module, name, nn.Parameter(torch.tensor(-1.0), requires_grad=False))
    module.impl = SimpleNamespace()
    return module


def scales() -> AttentionScales:
    k, v, q = (StaticScale.from_dequant(s, torch.bfloat16) for s in (0.1, 0.2, 0.3))
    return AttentionScales(k, v, q, "test")


def settings(**options) -> Settings:
    return Settings.of(SimpleNamespace(additional_config={"fp8_inc": options}))


def test_vllm_keeps_no_scales_of_its_own():
    module = layer()
    hpu_worker.prepare([module])
    assert module.quant_method is None
    assert not dict(module.named_parameters())


def test_scales_reach_the_pieces_of_an_implementation():
    module, loaded = layer(), []
    module.impl.fp8_inc = SimpleNamespace(load_scales=loaded.append)
    given = scales()
    give_scales(module, given)
    assert loaded == [given]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_the_scales_of_its_heads(rank):
    """Of four heads of K and V, and eight of q, on two ranks."""
    module = nn.Module()
    module.num_heads, module.num_kv_heads = 4, 2
    pieces = MHAPieces(GAUDI3, use_contiguous_pa=False)
    module.impl = SimpleNamespace(fp8_inc=pieces)
    values = {
        "k": (0.011, 0.012, 0.013, 0.014),
        "v": (0.021, 0.022, 0.023, 0.024),
        "q": tuple(0.03 + 0.001 * head for head in range(8)),
    }
    found = {role: FoundScale(role, max(v), per_head=v) for role, v in values.items()}
    layer = LayerScales(module)
    layer.take(found, lambda scale, per_head: scale * 448, rank, 2)
    give_scales(module, layer.scales(GAUDI3, torch.bfloat16, "test"))
    held = {
        "k": pieces.k_cache.scale,
        "v": pieces.v_cache.scale,
        "q": pieces.decode.q_scale,
    }
    for role, scale in held.items():
        own = values[role][: len(values[role]) // 2]
        if rank:
            own = values[role][len(values[role]) // 2 :]
        assert scale.dequant_scale.tolist() == [acting(value) for value in own]


def test_the_device_is_the_one_that_is_there(on_hpu):
    with hpu_ops.emulate("gaudi2"):
        assert settings().device == "gaudi2"
        assert settings(device="gaudi2").device == "gaudi2"
        with pytest.raises(ValueError, match="this is a gaudi2; leave the key out"):
            settings(device="gaudi3")


@pytest.mark.parametrize("mode, ours", [("QUANTIZE", True), ("MEASURE", False)])
def test_layers_are_ours_on_hpu_unless_inc_measures(
    on_hpu, monkeypatch, tmp_path, mode, ours
):
    assert hpu_worker.is_served_here()
    config = tmp_path / "inc.json"
    config.write_text(json.dumps({"mode": mode}))
    monkeypatch.setenv("QUANT_CONFIG", str(config))
    assert hpu_worker.is_served_here() is ours


def test_they_are_ours_while_the_worker_loads_weights_for_inc(on_hpu, monkeypatch):
    """It then calls its device_type cpu."""
    monkeypatch.setattr(current_platform, "device_type", "cpu")
    assert hpu_worker.is_served_here()


def test_a_quant_config_that_is_not_there_stops_the_start(on_hpu, monkeypatch):
    monkeypatch.setenv("QUANT_CONFIG", "nowhere.json")
    with pytest.raises(ValueError, match="QUANT_CONFIG: nowhere.json cannot be read"):
        hpu_worker.is_served_here()


def test_a_layer_that_inc_leaves_out_stops_the_start(on_hpu, monkeypatch, tmp_path):
    """On HPU all layers have one cache dtype."""
    helpers.write_file(tmp_path, helpers.mha(0, 2.0, 3.0) | helpers.mha(1, 2.0, 3.0))
    inc = helpers.read(tmp_path, blocklist={"names": [r"layers\.1\."]})
    monkeypatch.setenv("QUANT_CONFIG", inc.path)
    monkeypatch.setattr(quant_config, "read_for", lambda vllm_config: inc)
    monkeypatch.setattr(quant_config, "_wait_for_all_ranks", lambda: None)
    model = SimpleNamespace(model="here")
    engine = SimpleNamespace(model_config=model, additional_config={})
    layers = {f"model.layers.{n}.self_attn.attn": layer() for n in range(2)}
    for module in layers.values():
        module.impl.scale = 1.0
    with hpu_ops.emulate("gaudi3"):
        with pytest.raises(ValueError) as caught:
            quant_config.kv_scales(layers, engine, model)
        for part in (inc.path, "model.layers.1.self_attn.attn", "stays unquantised"):
            assert part in str(caught.value)
        del layers["model.layers.1.self_attn.attn"]
        found = quant_config.kv_scales(layers, engine, model).found
    assert found["layers.0"]["v"].dequant_scale == 2.0**-5  # 3 / 112, rounded up
