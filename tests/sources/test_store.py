# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The store keeps every scale as a dequant scale and refuses contradictions."""

import logging

import pytest
import torch
from safetensors.torch import save_file

from vllm.fp8_inc.sources.store import ScaleStore

LAYER = "model.layers.3.self_attn"


def store_of(tensors: dict[str, float | torch.Tensor], model: str = "m") -> ScaleStore:
    store = ScaleStore(model)
    for key, value in tensors.items():
        assert store.take(key, torch.as_tensor(value))
    return store


def values(store: ScaleStore) -> dict[str, float]:
    return {role: s.dequant_scale for role, s in store.found["layers.3"].items()}


def test_a_weight_is_left_to_the_model():
    store = ScaleStore("m")
    assert not store.take(f"{LAYER}.k_proj.weight_scale", torch.ones(1))
    assert not store.found


def test_roles_of_one_layer_come_from_several_names():
    store = store_of(
        {
            f"{LAYER}.kv_b_proj.output_scale": 0.25,
            f"{LAYER}.q.scale": 0.5,
            f"{LAYER}.prob_output_scale": 0.125,
        }
    )
    assert values(store) == {"k": 0.25, "v": 0.25, "q": 0.5, "prob": 0.125}


def test_a_quant_scale_is_turned():
    store = store_of({f"{LAYER}.attn.impl.k_cache.quant_input.scale_inv": 4.0})
    assert values(store) == {"k": 0.25}


@pytest.mark.parametrize("turned_first", [False, True])
def test_the_dequant_scale_wins_over_its_rounded_reciprocal(turned_first):
    scale = 0.0117
    pairs = [
        (f"{LAYER}.attn.impl.k_cache.dequant_output.scale", torch.tensor(scale)),
        (
            f"{LAYER}.attn.impl.k_cache.quant_input.scale_inv",
            torch.tensor(1 / scale).bfloat16(),
        ),
    ]
    store = store_of(dict(pairs[::-1] if turned_first else pairs))
    assert values(store) == {"k": torch.tensor(scale).item()}


def test_a_reciprocal_of_another_scale_is_an_error():
    keys = {
        f"{LAYER}.attn.impl.k_cache.dequant_output.scale": 0.25,
        f"{LAYER}.attn.impl.k_cache.quant_input.scale_inv": 0.25,
    }
    with pytest.raises(ValueError, match="0.25 and 4"):
        store_of(keys)


@pytest.mark.parametrize(
    "first, second, role",
    [
        (f"{LAYER}.k_scale", f"{LAYER}.k_proj.k_scale", "k"),
        (f"{LAYER}.kv_scale", f"{LAYER}.v_scale", "v"),
        (f"{LAYER}.q_scale", "layers.3.attention.q.scale", "q"),
    ],
)
def test_two_names_for_one_scale_must_agree(first, second, role):
    assert values(store_of({first: 0.25, second: 0.25}))[role] == 0.25
    with pytest.raises(ValueError) as error:
        store_of({first: 0.25, second: 0.250001})
    text = str(error.value)
    for part in (first, second, f"both for {role} of layers.3", "0.25 and 0.250001"):
        assert part in text


def test_a_key_twice_is_an_error_that_names_both_files(tmp_path):
    key = f"{LAYER}.k_scale"
    for name, value in [("a", 0.25), ("b", 0.5)]:
        save_file({key: torch.tensor(value)}, tmp_path / f"{name}.safetensors")
    store = store_of({key: 0.25}, str(tmp_path))
    assert store.take(key, torch.tensor(0.25))
    with pytest.raises(ValueError) as error:
        store.take(key, torch.tensor(0.5))
    for name in "ab":
        assert str(tmp_path / f"{name}.safetensors") in str(error.value)
    assert "0.25 and 0.5" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float8_e4m3fn])
def test_a_zero_point_must_be_zero(dtype):
    key = f"{LAYER}.q_zero_point"
    assert not store_of({key: torch.zeros(4, 1, 1).to(dtype)}).found
    with pytest.raises(ValueError) as error:
        store_of({key: torch.tensor([0.0, -2.0]).to(dtype)})
    assert f"{key} has the value -2, but a zero-point must be 0" in str(error.value)


@pytest.mark.parametrize("value", [0.0, float("nan"), 1e-35])
def test_a_reciprocal_is_checked_too(value):
    key = f"{LAYER}.attn.impl.v_cache.quant_input.scale_inv"
    with pytest.raises(ValueError, match=key):
        store_of({key: value})


def test_what_is_not_used_is_said(caplog_vllm):
    caplog_vllm.set_level(logging.DEBUG, logger="vllm")
    store = store_of(
        {
            f"{LAYER}.q_max": torch.ones(4),
            "model.layers.4.self_attn.q_max": torch.ones(4),
            "visual.blocks.7.attn.k_scale": 0.5,
        }
    )
    assert not store.found
    store.report_ignored()
    records = [(record.levelname, record.message) for record in caplog_vllm.records]
    assert records == [
        (
            "INFO",
            "fp8_inc: 1 scales of a vision or audio tower are ignored "
            "(visual.blocks.7.attn.k_scale)",
        ),
        (
            "DEBUG",
            "fp8_inc: 2 tensors that are no scales are ignored "
            "(model.layers.3.self_attn.q_max)",
        ),
    ]


def test_cleared_it_knows_nothing(caplog_vllm):
    store = store_of({f"{LAYER}.k_scale": 0.25, "visual.blocks.8.attn.k_scale": 0.5})
    store.clear()
    assert store.take(f"{LAYER}.k_scale", torch.tensor(0.5))
    assert values(store) == {"k": 0.5}
    store.report_ignored()
    assert not caplog_vllm.messages
