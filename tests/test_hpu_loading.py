# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What differs on HPU when scales are loaded, without a worker."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm.fp8_inc import hpu_ops, hpu_worker
from vllm.fp8_inc.scales import AttentionScales, StaticScale, give_scales
from vllm.fp8_inc.settings import Settings
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
