# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The twelve defects of the HPU worker's fp8_inc path, each beside ours.

Each test shows the defect on a minimal model of vllm-gaudi 091bbadd
(benchmarks/hpu_worker.py, or the lines that matter) and its absence in our pieces.
Numbered as in docs/hpu.md.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.hpu_worker import WorkerCache, WorkerDecode, WorkerMatmul
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
    BLOCK,
    FP8,
    attention,
    batch_of,
    cached_values,
    empty_cache,
    format_of,
    relative_error,
    scales,
    static,
)
from vllm.fp8_inc.adjustment import resolve_adjustment
from vllm.fp8_inc.attention.hpu_cache import Fp8KVCache, read_slots
from vllm.fp8_inc.attention.hpu_scales import DeviceScale, with_cache_of
from vllm.fp8_inc.attention.mha_hpu import MHAPieces
from vllm.fp8_inc.attention.mla_hpu import MLAPieces
from vllm.fp8_inc.formats import GAUDI3

LATENT, ROPE, HEADS, SIZE = 512, 64, 4, 64
SCALE = 0.08


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def fp8_cache(rows, scale, batch):
    """A cache with rows written by our writer, and what it holds in float32."""
    cache = empty_cache(batch, *rows.shape[1:])
    module = Fp8KVCache(use_contiguous_pa=False)
    module.scale.load(scale)
    return module(rows, cache, batch.slots)


class Latent:
    """An MLA layer on both sides: one cache, one query, and what is right."""

    def __init__(self, device, lengths, latent=None, query=None, contiguous=False):
        self.scale = static(5 / MAXIMUM[device])
        self.batch = batch_of(lengths, contiguous)
        rows = random(len(self.batch.slots), LATENT + ROPE, seed=1)
        rows = rows if latent is None else latent
        self.query = random(len(lengths), HEADS, LATENT + ROPE, seed=2)
        self.query = self.query if query is None else query
        self.cache = fp8_cache(rows, self.scale, self.batch)
        dequant = self.scale.dequant_scale
        keys = cached_values(self.batch, self.cache, dequant, device)
        self.keys = [k[:, None] for k in keys]
        values = [k[..., :LATENT] for k in self.keys]
        self.expected = attention(self.query, self.keys, values, SCALE)
        self.pieces = MLAPieces(format_of(device), contiguous)
        self.pieces.load_scales(scales(5 / MAXIMUM[device]))
        quant = self.scale.quant_scale.float().item()
        q_quant = MAXIMUM[device] / max(self.query.abs().max().item(), 1.0)
        self.worker = WorkerDecode.fp8(q_quant / SCALE, quant, quant, contiguous, True)

    def arguments(self):
        return {
            "query": self.query,
            "key_cache": self.cache[:, None],
            "value_cache": None,
            "scale": SCALE,
            "kv_lora_rank": LATENT,
            **self.batch.decode_arguments(),
        }

    def error(self, decode):
        return relative_error(decode(**self.arguments()), self.expected)


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


def test_3_the_context_of_a_prefill_is_fetched_by_id(device):
    latent = Latent(device, [300, 200], contiguous=True)
    blocks = torch.tensor(latent.batch.tables[0])
    rows = latent.cache.unflatten(0, (-1, BLOCK))
    right = latent.keys[0][:, 0]
    worker = WorkerCache(latent.scale.quant_scale.float(), contiguous=True)
    ours = latent.pieces.latent_cache
    assert ours.use_contiguous_pa
    wrong = worker.fetch(rows, blocks).flatten(0, 1)[:300]
    assert relative_error(wrong, right) > 0.5
    fetched = ours.fetch_from_cache(rows, blocks).flatten(0, 1)[:300]
    assert relative_error(fetched, right) < 2**-8
    decoded = ours.fetch_codes(rows, latent.batch.block_list)
    assert decoded.data_ptr() == rows.data_ptr()  # and decode copies nothing


@pytest.mark.parametrize("blocks", [16, 64])
def test_4_sums_over_blocks_do_not_saturate(device, blocks):
    """Uniform scores: 128 a block is in the range of FP8, its sum over blocks not."""
    query = torch.zeros(1, HEADS, LATENT + ROPE).bfloat16()
    latent = Latent(device, [blocks * BLOCK], query=query)
    latent.worker.qk.quant_scales = (
        torch.tensor(1.0),
        latent.worker.k_cache.quant_scale,
    )
    # The sum of the softmax, 128 a block, is clipped to max, which divides the output.
    too_large = BLOCK * blocks / MAXIMUM[device] - 1
    assert latent.error(latent.worker) == pytest.approx(too_large, rel=0.1)
    assert latent.error(latent.pieces.decode) < 0.05


def test_5_small_probabilities_are_not_flushed(device):
    """In a block one key has P = 1 and V = 0; the rest is the sum of P = 1/2000."""
    rows = torch.zeros(BLOCK, LATENT + ROPE)
    rows[:, :LATENT] = random(BLOCK, LATENT, seed=4) * 0.1 + 1
    rows[5, :LATENT], rows[5, LATENT:] = 0, 2
    query = torch.zeros(1, HEADS, LATENT + ROPE)
    query[..., LATENT:] = 7.6 / (2 * ROPE * SCALE)  # e^7.6 = 1998
    latent = Latent(device, [BLOCK], rows.bfloat16(), query.bfloat16())
    latent.worker.over_blocks = WorkerMatmul(None)  # defect 4 aside
    assert latent.error(latent.worker) > 0.9
    assert latent.error(latent.pieces.decode) < 0.05


def test_6_prefill_and_decode_have_their_own_q(device):
    """Absorbing kv_b_proj makes q larger: one scale clips it, or wastes the other."""
    query = random(2, HEADS, LATENT + ROPE, seed=2)
    query[..., :LATENT] *= 2.5  # what absorption does to the range
    latent = Latent(device, [200, 70], query=query)
    latent.worker.over_blocks = WorkerMatmul(None)
    prefill = MAXIMUM[device] / 2.0 / SCALE  # calibrated on the prefill's q
    latent.worker.qk.quant_scales = (
        torch.tensor(prefill),
        latent.worker.k_cache.quant_scale,
    )
    assert latent.error(latent.worker) > 0.3
    pieces = latent.pieces
    pieces.load_scales(scales(5 / MAXIMUM[device], q=2.0 / MAXIMUM[device]))
    assert (
        pieces.prompt.scales["q"].dequant_scale
        == static(2.0 / MAXIMUM[device]).dequant_scale
    )
    assert pieces.decode.q_scale is None  # each row by its amax
    by_row = latent.error(pieces.decode)
    own = static(query.abs().max().item() / MAXIMUM[device])
    pieces.decode.load_scales(scales(5 / MAXIMUM[device]), own)
    assert by_row < 0.15 and latent.error(pieces.decode) < 0.15


def test_7_logits_are_float32(device):
    """Worker: the float32 buffer of fp32_softmax is handed over and not used."""
    out = torch.empty(1, 1, 1, 1, dtype=torch.float32)
    one = torch.tensor(1.0)
    x = torch.full((1, 1, 1, 8), 3.0).bfloat16()
    y = torch.full((1, 1, 8, 1), 11.0).bfloat16()
    y[..., 0, 0] = 10
    worker = WorkerMatmul((one, one))(x, y, out=out)
    assert worker.dtype == torch.bfloat16 and worker is not out
    assert worker.item() != 3 * (7 * 11 + 10)
    pieces = MLAPieces(format_of(device), False)
    pieces.load_scales(scales(1.0))
    pieces.decode.load_scales(scales(1.0), static(1.0))
    logits = pieces.decode._logits(
        x[0], y.mT.to(FP8), torch.tensor([0]), kv_heads=1, scale=1.0
    )
    assert logits.dtype == torch.float32 and logits.item() == 3 * (7 * 11 + 10)


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
    reader.load_scales(with_cache_of(own, target))
    back = read_slots(reader.k_cache, cache, batch.slots)
    assert back.dtype == torch.bfloat16
    assert relative_error(back, rows.float()) < 0.04
    assert reader.decode.q_scale.dequant_scale == own.q.dequant_scale
    plain = rows.clone()  # a bf16 cache of the worker goes the plain way
    assert torch.equal(read_slots(nn.Module(), plain, torch.tensor([3])), rows[3:4])


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
        role: fp8_cache(rows[role], getattr(layer, role), batch) for role in ("k", "v")
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


def test_the_model_of_the_worker_is_right_where_nothing_saturates(device):
    """So that the tests above show its defects and not the model's."""
    latent = Latent(device, [100, 60])
    for decode in (latent.worker, WorkerDecode.bf16(False, True)):
        arguments = latent.arguments()
        if decode is latent.worker:
            decode.over_blocks = WorkerMatmul(None)
        else:
            plain = torch.zeros(arguments["key_cache"].shape).bfloat16()
            plain[latent.batch.slots] = torch.cat(latent.keys).bfloat16()
            arguments["key_cache"] = plain
        out = decode(**arguments)
        assert relative_error(out, latent.expected) < 0.15
