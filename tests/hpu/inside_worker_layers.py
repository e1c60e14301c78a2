# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The worker's own layers; pytest runs this for tests/hpu/test_worker_layers.py.

Each test fails on the worker as it is and passes with our patches.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm_gaudi.attention.backends.hpu_attn import HPUAttentionImpl, HPUMLAImpl
from vllm_gaudi.extension.utils import VLLMKVCache
from vllm_gaudi.ops.hpu_compressed_tensors import (
    HPUCompressedTensorsW8A8Fp8,
    HPUCompressedTensorsW8A8Fp8MoEMethod,
)

from tests.hpu.scenes import BLOCK, scales
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.fp8_inc.hpu_ops import emulated_format
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    get_and_maybe_dequant_weights,
)

FP8 = torch.float8_e4m3fn
HEADS, KV_HEADS, SIZE = 4, 2, 32
K_SCALE, V_SCALE = 0.02, 0.01


@pytest.fixture(autouse=True)
def config():
    with set_current_vllm_config(VllmConfig()):
        yield


def attention_impl(**changes) -> HPUAttentionImpl:
    options = {
        "num_heads": HEADS,
        "head_size": SIZE,
        "scale": SIZE**-0.5,
        "num_kv_heads": KV_HEADS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "fp8_inc",
    }
    impl = HPUAttentionImpl(**options | changes)
    if pieces := getattr(impl, "fp8_inc", None):
        pieces.load_scales(scales(K_SCALE, V_SCALE, 0.01))
    return impl


def random(*shape, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def cached(rows: torch.Tensor, dequant_scale: float) -> torch.Tensor:
    """FP8 rows of a cache whose first block holds ``rows``."""
    cache = torch.zeros(2 * BLOCK, *rows.shape[1:], dtype=torch.uint8)
    codes = emulated_format().encode(rows.float() / dequant_scale)
    cache[: len(rows)] = codes
    return cache.view(FP8)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [tokens, heads, size], in float32."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    return out.transpose(0, 1).flatten(1)


def test_a_layer_that_shares_a_cache_reads_values_and_not_codes():
    tokens = 16
    q, k, v = (
        random(tokens, heads, SIZE, seed=n)
        for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    impl = attention_impl(kv_sharing_target_layer_name="other")
    metadata = SimpleNamespace(
        is_prompt=True,
        slot_mapping=torch.arange(tokens)[None],
        seq_lens_tensor=torch.tensor([tokens]),
        block_list=None,
        block_size=BLOCK,
        attn_bias=None,
    )
    caches = (cached(k, K_SCALE), cached(v, V_SCALE), None, None)
    unused = random(tokens, KV_HEADS * SIZE, seed=9)
    out = impl.forward(None, q.flatten(1)[None], unused, unused, caches, metadata)
    expected = attended(q, k, v)
    error = (out[0].float() - expected).norm() / expected.norm()
    assert error < 0.1


def test_encoder_decoder_layers_pass_the_scale_of_v(monkeypatch):
    seen = {}
    impl = attention_impl(attn_type="encoder_decoder")
    monkeypatch.setattr(
        impl, "forward_encoder_decoder", lambda **kwargs: seen.update(kwargs)
    )
    layer = SimpleNamespace(_k_scale_float=K_SCALE, _v_scale_float=V_SCALE)
    impl.forward(layer, None, None, None, None, None)
    assert seen["v_scale"] == V_SCALE


def test_mla_gathers_the_context_of_a_prompt_by_block_id(monkeypatch):
    """Under contiguous PA, with any cache."""
    latent, rope = 32, 16
    module = VLLMKVCache()
    module.use_contiguous_pa = True
    cache = random(4 * BLOCK, latent + rope)
    fetched = []
    kv_b_proj = torch.nn.Linear(latent, 2 * 48, bias=False, dtype=torch.bfloat16)

    def project(values):
        fetched.append(values)
        return (kv_b_proj(values),)

    impl = SimpleNamespace(
        latent_cache_k=module,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=24,
        qk_head_dim=40,
        v_head_dim=24,
        num_heads=2,
        kv_b_proj=project,
        use_merged_prefill=False,
        prefill_impl="naive_impl",
        scale=0.1,
        matmul_qk=torch.matmul,
        matmul_av=torch.matmul,
        softmax=torch.softmax,
        fused_scaled_dot_product_attention=None,
    )
    new = random(8, latent + rope, seed=1)
    metadata = SimpleNamespace(
        block_list=torch.tensor([2]),
        block_size=BLOCK,
        seq_lens_tensor=torch.tensor([8]),
        attn_bias=None,
    )
    HPUMLAImpl.forward_mha(impl, random(8, 80), new, (cache,), metadata)
    expected = cache[2 * BLOCK : 3 * BLOCK, :latent]
    assert fetched[0][:BLOCK].equal(expected)


def test_experts_are_not_renormalised_where_the_model_does_not():
    x, logits = random(5, 8), random(5, 6, seed=1).float()
    got = {}

    def experts(hidden, ids, weights, **kwargs):
        got.update(ids=ids, weights=weights.float())
        return hidden

    layer = SimpleNamespace(
        use_grouped_topk=False,
        custom_routing_function=None,
        renormalize=False,
        top_k=2,
        topk_group=None,
        num_expert_group=None,
        scoring_func="softmax",
        routed_scaling_factor=1.0,
        e_score_correction_bias=None,
        moe_config=SimpleNamespace(num_logical_experts=6, is_sequence_parallel=False),
        moe_op=experts,
        activation="silu",
    )
    method = object.__new__(HPUCompressedTensorsW8A8Fp8MoEMethod)
    method.apply_monolithic(layer, x, logits)
    probabilities = logits.softmax(-1)
    expected = probabilities.gather(1, got["ids"])
    torch.testing.assert_close(got["weights"], expected, rtol=1e-2, atol=0)
    chosen = probabilities.topk(2).indices.sort(-1).values
    assert got["ids"].sort(-1).values.equal(chosen)


@pytest.mark.parametrize("input_scale", [0.013, 0.001])
def test_mla_absorbs_the_weight_that_the_checkpoint_has(input_scale):
    """1 / 0.013 is no FP8 number, and 1 / 0.001 is beyond the range."""
    weight, weight_scale = random(6, 16).float(), torch.full((6, 1), 0.01)
    fmt = emulated_format()
    codes = fmt.encode(weight / weight_scale)
    scheme = object.__new__(HPUCompressedTensorsW8A8Fp8)
    scheme.strategy, scheme.is_static_input_scheme = "channel", True
    scheme.weight_block_size = None
    layer = torch.nn.Module()
    layer.scheme, layer.weight_block_size = scheme, None
    layer.input_size_per_partition = 16
    layer.weight = torch.nn.Parameter(codes.view(FP8), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(weight_scale, requires_grad=False)
    layer.input_scale = torch.nn.Parameter(
        torch.tensor([input_scale]), requires_grad=False
    )
    layer.quant_method = SimpleNamespace(
        apply=lambda layer, x, bias: scheme.apply_weights(layer, x, bias)
    )
    scheme.process_weights_after_loading(layer)
    read = get_and_maybe_dequant_weights(layer, torch.bfloat16).float()
    expected = fmt.decode(codes) * weight_scale
    torch.testing.assert_close(read, expected, rtol=0.01, atol=1e-4)
