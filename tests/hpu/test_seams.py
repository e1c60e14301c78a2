# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the patched attention classes of the worker are given."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.hpu.scenes import scales, static
from vllm.fp8_inc import hpu_ops
from vllm.fp8_inc.attention import hpu_seams
from vllm.fp8_inc.attention.hpu_cache import Fp8KVCache
from vllm.fp8_inc.attention.hpu_decode import PagedDecode
from vllm.fp8_inc.attention.hpu_prompt import PromptAttention
from vllm.fp8_inc.attention.hpu_scales import probability_scale
from vllm.fp8_inc.attention.mla_hpu import PlainMatmul
from vllm.fp8_inc.formats import GAUDI2, GAUDI3
from vllm.fp8_inc.hpu_device import hpu_format

UPSTREAM = object()
PRODUCTS = ("matmul_qk", "matmul_av", "batch2block_matmul", "block2batch_matmul")


class Cache(nn.Module):
    def __init__(self, contiguous):
        super().__init__()
        self.use_contiguous_pa = contiguous


def implementation(caches, contiguous=True, fp8=True, fused=True):
    """An attention class of the worker at the end of its __init__."""
    impl = nn.Module()
    impl.kv_cache_dtype = "fp8_inc" if fp8 else "auto"
    impl.alibi_slopes = impl.sinks = None
    for name in caches:
        setattr(impl, name, Cache(contiguous))
    for name in (*PRODUCTS, "softmax"):
        setattr(impl, name, nn.Module())
    impl.fused_scaled_dot_product_attention = nn.Module() if fused else None
    return impl


KINDS = {
    "mla": (hpu_seams.mla_paged_attention, ("latent_cache_k",)),
    "mha": (hpu_seams.mha_paged_attention, ("k_cache", "v_cache")),
}


@pytest.fixture(params=["fp8", "bf16"])
def matmul(request, monkeypatch):
    config = SimpleNamespace(
        additional_config={"fp8_inc": {"hpu_matmul": request.param}}
    )
    monkeypatch.setattr(hpu_seams, "get_current_vllm_config", lambda: config)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contiguous", [False, True])
def test_everything_of_the_fp8_path_is_replaced(device, matmul, kind, contiguous):
    paged_attention, caches = KINDS[kind]
    impl = implementation(caches, contiguous)
    decode = paged_attention(impl, UPSTREAM)
    assert isinstance(decode, PagedDecode) and decode is impl.fp8_inc.decode
    assert decode.matmul == matmul and decode.format.name == device
    for name in caches:
        assert isinstance(getattr(impl, name), Fp8KVCache)
        assert getattr(impl, name).use_contiguous_pa is contiguous
    assert decode.k_cache is getattr(impl, caches[0])
    assert decode.v_cache is (impl.v_cache if kind == "mha" else None)
    assert all(isinstance(getattr(impl, name), PlainMatmul) for name in PRODUCTS)
    fused = impl.fused_scaled_dot_product_attention
    assert isinstance(fused, PromptAttention) and fused.matmul == matmul
    impl.fp8_inc.load_scales(scales(0.1, 0.2, 0.3))
    assert not any(buffer.isnan().any() for buffer in impl.buffers())
    x = torch.eye(2)
    assert torch.equal(impl.matmul_qk(x, x * 2), x * 2)
    assert torch.equal(impl.softmax(x, dim=-1), x.softmax(-1))
    assert impl.enable_fp8_attn  # the worker has it false where QUANT_CONFIG is set


@pytest.mark.parametrize("kind", KINDS)
def test_other_caches_and_other_prefills_stay(device, matmul, kind):
    paged_attention, caches = KINDS[kind]
    impl = implementation(caches, fp8=False)
    before = dict(impl.named_modules())
    assert paged_attention(impl, UPSTREAM) is UPSTREAM
    assert dict(impl.named_modules()) == before
    impl = implementation(caches, fused=False)
    paged_attention(impl, UPSTREAM)
    assert impl.fused_scaled_dot_product_attention is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["measure", "QUANTIZE", None])
def test_inc_measures_the_modules_of_the_worker(
    device, matmul, kind, mode, tmp_path, monkeypatch, caplog_vllm
):
    config = tmp_path / "quant.json"
    config.write_text(json.dumps({"mode": mode} if mode else {}))
    monkeypatch.setenv("QUANT_CONFIG", str(config))
    paged_attention, caches = KINDS[kind]
    impl = implementation(caches)
    before = dict(impl.named_modules())
    measures = mode == "measure"
    assert (paged_attention(impl, UPSTREAM) is UPSTREAM) == measures
    assert (dict(impl.named_modules()) == before) == measures
    assert (f"{config} measures" in caplog_vllm.text) == measures


def test_inc_knows_none_of_our_modules(device, matmul):
    """It patches by the name of the class."""
    from neural_compressor.torch.algorithms.fp8_quant._core import patching_common

    assert {"Matmul", "VLLMKVCache"} <= patching_common._mod_default_dict.keys()
    for paged_attention, caches in KINDS.values():
        impl = implementation(caches)
        paged_attention(impl, UPSTREAM)
        ours = {type(module).__name__ for module in impl.modules()} - {"Module"}
        assert {"Fp8KVCache", "PlainMatmul", "PlainSoftmax"} <= ours
        assert not ours & patching_common._mod_default_dict.keys()


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_what_mha_does_not_support_stops_the_start(device, matmul, name):
    impl = implementation(("k_cache", "v_cache"))
    setattr(impl, name, torch.ones(4))
    with pytest.raises(NotImplementedError, match="kv-cache-dtype auto"):
        hpu_seams.mha_paged_attention(impl, UPSTREAM)


@pytest.mark.parametrize("device_type, fmt", [("two", GAUDI2), ("three", GAUDI3)])
def test_the_bridge_names_the_device(monkeypatch, device_type, fmt):
    experimental = SimpleNamespace(
        _get_device_type=lambda: device_type,
        synDeviceType=SimpleNamespace(synDeviceGaudi2="two", synDeviceGaudi3="three"),
    )
    for name in ("", ".torch", ".torch.utils"):
        full = f"habana_frameworks{name}"
        monkeypatch.setitem(sys.modules, full, ModuleType(full))
    sys.modules["habana_frameworks.torch.utils"].experimental = experimental
    assert hpu_format() is fmt
    experimental._get_device_type = lambda: "one"
    with pytest.raises(RuntimeError, match="not of device type one"):
        hpu_format()


def test_without_the_bridge_the_emulated_device_counts(device):
    assert "habana_frameworks" not in sys.modules
    assert hpu_format() is hpu_ops.emulated_format()
    assert hpu_format().name == device


@pytest.mark.parametrize("fmt, power", [(GAUDI2, 128.0), (GAUDI3, 256.0)])
def test_the_scale_of_probabilities(fmt, power, caplog_vllm):
    """A power of two within the range, unless the checkpoint's covers 1."""
    default = probability_scale(scales(0.1), fmt)
    assert default.quant_scale == power and default.dequant_scale == 1 / power
    covers = scales(0.1, prob=1 / 200)
    assert probability_scale(covers, fmt) is covers.prob
    assert not caplog_vllm.text
    clips = scales(0.1, prob=0.7 / fmt.max)
    assert probability_scale(clips, fmt).quant_scale == power
    said = f"prob scales below 1 / {fmt.max:g} cut off the probability 1"
    assert caplog_vllm.text.count(said) == 1
    one_clips = scales(0.1, prob=[1 / 200, 0.5 / fmt.max])
    assert probability_scale(one_clips, fmt).quant_scale == power
    assert static(1 / power).quant_scale == power
