# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The caches of bf16 engines hold the bytes that the device's cast would leave."""

import numpy as np
import pytest

from tests import device_numbers
from tests.checkpoints import (
    deepseek_config,
    kv_scales,
    llama_config,
    quantization_config,
    weights,
    write,
)
from tests.device_numbers import MAXIMUM
from tests.engines import ask, attention_layers, engine, prompt
from vllm.fp8_inc.attention.mha_cpu import CPUFp8Impl
from vllm.fp8_inc.attention.mla_cpu import CPUMLAImpl

BLOCK = 32


def run(folder, config, device, impl, record):
    """Serves one request; returns the scales of the checkpoint and the caches."""
    quantization = quantization_config(config_groups={})
    scales = kv_scales(config)
    path = write(
        folder,
        config | {"quantization_config": quantization},
        weights(config) | scales,
    )
    written = []
    write_cache = impl.do_kv_cache_update

    def recorded(self, *args):
        written.append((self, record(*args)))
        write_cache(self, *args)

    extra = {"fp8_inc": {"device": device}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(impl, "do_kv_cache_update", recorded)
        with engine(path, additional_config=extra, block_size=BLOCK) as llm:
            ask(llm, [prompt(70)], tokens=4)
            layers = attention_layers(llm)
            caches = [device_numbers.to_numpy(layer.kv_cache) for layer in layers]
            impls = [layer.impl for layer in layers]
    return scales, caches, impls, written


def codes(values, scale, device):
    """By ml_dtypes; the adjustment goes into the dequant scale first."""
    dequant_scale = np.float32(scale * 448 / MAXIMUM[device])
    return device_numbers.cast(values, np.float32(1) / dequant_scale, device)


@pytest.mark.parametrize("device", MAXIMUM)
def test_mla_latent(tmp_path, device):
    def record(kv_c, k_pe, kv_cache, slots, *_):
        return kv_c.clone(), k_pe.clone(), slots.clone()

    config = deepseek_config()
    scales, caches, impls, written = run(tmp_path, config, device, CPUMLAImpl, record)
    checked = 0
    for impl, (kv_c, k_pe, slots) in written:
        n = impls.index(impl)
        # v_scale is the larger one in kv_scales.
        scale = scales[f"model.layers.{n}.self_attn.v_scale"].item()
        rows = caches[n].reshape(-1, caches[n].shape[-1])[slots.numpy()]
        width = kv_c.shape[-1]
        np.testing.assert_array_equal(rows[:, :width], codes(kv_c, scale, device))
        np.testing.assert_array_equal(
            rows[:, width:], codes(k_pe.squeeze(1), scale, device)
        )
        checked += len(rows)
    assert checked == 3 * (70 + 3)


@pytest.mark.parametrize("device", MAXIMUM)
def test_gqa_keys_and_values(tmp_path, device):
    def record(layer, key, value, kv_cache, slots):
        return key.clone(), value.clone(), slots.clone()

    config = llama_config()
    scales, caches, impls, written = run(tmp_path, config, device, CPUFp8Impl, record)
    heads, size = config["num_key_value_heads"], config["head_dim"]
    checked = 0
    for impl, (key, value, slots) in written:
        n = impls.index(impl)
        layer = f"model.layers.{n}.self_attn"
        halves = caches[n].reshape(-1, heads, 2, BLOCK * size)
        k_plane = halves[:, :, 0].reshape(-1, heads, size, BLOCK)
        v_plane = halves[:, :, 1].reshape(-1, heads, BLOCK, size)
        k_codes = codes(key, scales[f"{layer}.k_scale"].item(), device)
        v_codes = codes(value, scales[f"{layer}.v_scale"].item(), device)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, BLOCK)
            np.testing.assert_array_equal(k_plane[block, :, :, offset], k_codes[token])
            np.testing.assert_array_equal(v_plane[block, :, offset], v_codes[token])
            checked += 1
    assert checked == 3 * (70 + 3)
