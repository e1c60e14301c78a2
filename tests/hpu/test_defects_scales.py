# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Defects of the HPU worker's handling of scales, each beside ours.

Each test shows a defect on the lines of vllm-gaudi 091bbadd that matter, and its
absence here. Numbered as in docs/hpu.md; the others are in test_defects.py.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.checkpoints import (
    checkpoint,
    fp8_config,
    kv_scales,
    llama_config,
    quantization_config,
    quantize,
    weights,
    write,
)
from tests.device_numbers import MAXIMUM
from tests.engines import acting, engine, loaded
from tests.hpu.scenes import (
    attention,
    batch_of,
    empty_cache,
    format_of,
    random,
    relative_error,
    scales,
    static,
    written_cache,
)
from vllm.fp8_inc.adjustment import resolve_adjustment
from vllm.fp8_inc.attention.hpu_scales import DeviceScale
from vllm.fp8_inc.attention.mha_hpu import MHAPieces
from vllm.fp8_inc.formats import GAUDI3

SIZE = 64


def test_1_mla_takes_the_larger_of_k_and_v(tmp_path):
    """Worker: aligned while the buffers hold their default, then overwritten."""
    layer = SimpleNamespace(k=torch.tensor(1.0), v=torch.tensor(1.0))
    layer.k.copy_(torch.maximum(layer.k, layer.v))
    layer.k, layer.v = torch.tensor(0.011), torch.tensor(0.031)  # the checkpoint's
    assert layer.k < layer.v  # so the latent is written with 0.011: V clips
    with engine(checkpoint(tmp_path, "mla")) as llm:
        ours = loaded(llm)
    assert [s["k"] for s in ours] == [acting(0.031 + 0.007 * n) for n in range(3)]
    assert all(s["k"] == s["v"] for s in ours)


def test_2_no_adjustment_on_gaudi3_keeps_448():
    """Worker: without the adjustment a 240 source is assumed, on Gaudi3 too."""
    dequant_scale, amax = 3.0 / 448, 3.0
    assumed = 240.0
    worker_quant = GAUDI3.max / (dequant_scale * assumed)
    factor = resolve_adjustment({}, GAUDI3, {"VLLM_SCALE_ADJUSTMENT": "false"}).factor
    ours = static(dequant_scale * factor)
    values = torch.linspace(-amax, amax, 999).bfloat16()
    worker = GAUDI3.decode(GAUDI3.cast(values, torch.tensor(worker_quant)))
    worst = (worker / worker_quant - values.float()).abs().max().item()
    assert worst == pytest.approx(
        amax * (1 - 240 / 448), rel=0.01
    )  # clips at amax/1.87
    back = GAUDI3.decode(GAUDI3.cast(values, ours.quant_scale)) * ours.dequant_scale
    assert (back - values.float()).abs().max() < amax / 25  # half a step at the top


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "modelopt"])
def test_8_every_quant_method_reaches_the_scales(tmp_path, method):
    """Worker: of these only compressed-tensors; the others run at 1.0."""
    config = llama_config()
    config["quantization_config"] = {
        "compressed-tensors": quantization_config(config_groups={}),
        "fp8": fp8_config(),
        "modelopt": None,
    }[method]
    found, tensors = kv_scales(config), weights(config)
    if method == "fp8":
        tensors = quantize(tensors, static=False)
    if method == "modelopt":  # names of ModelOpt; the weights stay bf16
        del config["quantization_config"]
        found = {
            k.replace("attn.k_", "attn.k_proj.k_").replace(
                "attn.v_", "attn.v_proj.v_"
            ): v
            for k, v in found.items()
            if not k.endswith("q_scale")
        }
    with engine(write(tmp_path, config, tensors | found)) as llm:
        ours = loaded(llm)
    assert [s["k"] for s in ours] == [acting(0.011 + 0.005 * n) for n in range(3)]
    assert [s["v"] for s in ours] == [acting(0.031 + 0.007 * n) for n in range(3)]


def test_9_scales_per_head_are_loaded(device):
    each = [0.02, 0.5]
    worker = nn.Parameter(torch.tensor([1.0]), requires_grad=False)
    with pytest.raises(RuntimeError, match="shape"):
        worker.data.copy_(torch.tensor(each))
    scale = DeviceScale()
    scale.load(static(each))
    rows = random(50, 2, SIZE) * torch.tensor([1.0, 30.0])[:, None]
    back = scale.dequantize(scale.quantize(rows.bfloat16()), torch.float32)
    for head in (0, 1):
        assert relative_error(back[:, head], rows[:, head].float()) < 0.04


def test_10_a_shared_cache_is_dequantised(device):
    """Also with the scale of the layer that wrote it, which is not the reader's."""
    writer = MHAPieces(format_of(device), False)
    target = scales(5 / MAXIMUM[device], 7 / MAXIMUM[device])
    writer.load_scales(target)
    batch = batch_of([40], False)
    rows = random(40, 2, SIZE)
    cache = writer.k_cache(rows, empty_cache(batch, 2, SIZE), batch.slots)
    worker = cache.index_select(0, batch.slots).view(rows.shape)
    assert relative_error(worker, rows.float()) > 1
    reader = MHAPieces(format_of(device), False)
    own = scales(1.0, 1.0, q=0.5)
    reader.load_scales(replace(own, k=target.k, v=target.v))
    read = cache.index_select(0, batch.slots).view(rows.shape)
    back = reader.k_cache.scale.dequantize(read, torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert relative_error(back, rows.float()) < 0.04
    assert reader.decode.q_scale.dequant_scale == own.q.dequant_scale


class Layer(nn.Module):
    """What vLLM's Attention has of scales."""

    def __init__(self):
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self._k_scale_float = 1.0


def test_11_a_layer_keeps_its_attributes_and_reloads():
    """Worker: deletes them once the scales are in."""
    layer = Layer()
    for name in ("_k_scale", "_k_scale_float"):
        delattr(layer, name)
    with pytest.raises(AttributeError):
        layer._k_scale.copy_(torch.tensor(0.1))  # a reload
    with pytest.raises(AttributeError):
        _ = layer._k_scale_float  # what the cross-attention is called with
    pieces = MHAPieces(GAUDI3, False)
    pieces.load_scales(scales(0.1, 0.2, 0.3))
    before = dict(pieces.named_buffers())
    held = {name: buffer.data_ptr() for name, buffer in before.items()}
    pieces.load_scales(scales(0.4, 0.5, 0.6))
    after = dict(pieces.named_buffers())
    assert {name: buffer.data_ptr() for name, buffer in after.items()} == held
    assert after["k_cache.scale.dequant_scale"] == static(0.4).dequant_scale
    assert not pieces.state_dict() and not list(pieces.parameters())


def test_12_v_has_its_own_scale_in_cross_attention(device):
    """Decode of a cross-attention: nothing is written, V is read by V's scale."""
    pieces = MHAPieces(format_of(device), False)
    layer = scales(5 / MAXIMUM[device], 40 / MAXIMUM[device])
    pieces.load_scales(layer)
    batch = batch_of([200, 77], False)
    rows = {"k": random(277, 2, SIZE, seed=1), "v": random(277, 2, SIZE, seed=3) * 9}
    caches = {
        role: written_cache(rows[role], getattr(layer, role), batch)
        for role in ("k", "v")
    }
    for role, module in (("k", pieces.k_cache), ("v", pieces.v_cache)):
        assert module(None, caches[role], None) is caches[role]
    query = random(2, 4, SIZE, seed=2)
    out = pieces.decode.forward_decode(
        query=query[:, None].flatten(2),
        key_cache=caches["k"],
        value_cache=caches["v"],
        scale=SIZE**-0.5,
        **batch.decode_arguments(),
    )
    per_token = [list(rows[role].float().split(batch.lengths)) for role in ("k", "v")]
    expected = attention(query, *per_token, SIZE**-0.5)
    assert relative_error(out, expected) < 0.08
    worker = out * (layer.k.dequant_scale / layer.v.dequant_scale)  # K's as V's
    assert relative_error(worker, expected) > 0.8
