# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The FP8 cache of MHA: upstream's layout, and both readers of it."""

import math

import pytest
import torch

from vllm import _custom_ops as ops
from vllm.fp8_inc.attention import mha_cpu
from vllm.fp8_inc.attention.mha_cpu import CPUFp8Impl, planes
from vllm.fp8_inc.formats import GAUDI2
from vllm.fp8_inc.scales import AttentionScales, StaticScale
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 32
BLOCKS = [[3, 0], [5, 1]]
LENGTHS = [41, 57]
QUERIES = [1, 9]
K_SCALE, V_SCALE = 0.013, 0.021


@pytest.fixture(scope="module", autouse=True)
def kernels():
    current_platform.import_kernels()


@pytest.fixture
def tokens():
    """K, V [tokens, kv_heads, size] of both requests, and their slots."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    key = torch.randn(total, KV_HEADS, SIZE, generator=generator).bfloat16()
    value = torch.randn(total, KV_HEADS, SIZE, generator=generator).bfloat16()
    slots = [
        blocks[i // BLOCK] * BLOCK + i % BLOCK
        for blocks, length in zip(BLOCKS, LENGTHS, strict=True)
        for i in range(length)
    ]
    return key, value, torch.tensor(slots)


def cache(dtype):
    return torch.zeros(6, KV_HEADS, BLOCK, 2 * SIZE, dtype=dtype)


def test_planes_are_upstreams_layout(tokens):
    """Upstream's own bf16 writer, which every CPU has, against our view."""
    key, value, slots = tokens
    kv_cache = cache(torch.bfloat16)
    halves = kv_cache.view(6, KV_HEADS, 2 * BLOCK, SIZE).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, "vec")
    k_plane, v_plane = planes(kv_cache, SIZE)
    blocks, offsets = slots // BLOCK, slots % BLOCK
    assert torch.equal(k_plane[blocks, :, :, offsets], key)
    assert torch.equal(v_plane[blocks, :, offsets], value)


def implementation():
    """CPUFp8Impl without an engine."""
    impl = object.__new__(CPUFp8Impl)
    impl.head_size, impl.scale, impl.format = SIZE, SIZE**-0.5, GAUDI2
    impl.num_queries_per_kv = HEADS // KV_HEADS
    impl.kv_sharing_target_layer_name = impl.alibi_slopes = impl.sinks = None
    impl.sliding_window, impl.logits_soft_cap = -1, 0
    impl.kv_cache_dtype, impl.isa = mha_cpu._UPSTREAM_DTYPE, mha_cpu._UPSTREAM_ISA
    impl.attn_type = "decoder"
    k, v = (StaticScale.from_dequant(s, torch.bfloat16) for s in (K_SCALE, V_SCALE))
    impl.scales = AttentionScales(k, v, None, "test")
    return impl


def metadata(upstream):
    starts = torch.tensor([0, QUERIES[0], sum(QUERIES)], dtype=torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    schedule = None
    if upstream:
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=2,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=SIZE,
            seq_lens=lengths,
            dtype=torch.bfloat16,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=mha_cpu._UPSTREAM_ISA,
            enable_kv_split=False,
            kv_cache_dtype=mha_cpu._UPSTREAM_DTYPE,
        )
    return CPUAttentionMetadata(
        num_actual_tokens=sum(QUERIES),
        max_query_len=max(QUERIES),
        query_start_loc=starts,
        max_seq_len=max(LENGTHS),
        seq_lens=lengths,
        block_table=torch.tensor(BLOCKS, dtype=torch.int32),
        slot_mapping=torch.empty(0),
        scheduler_metadata=schedule,
    )


def expected(key, value, query, k_scale=K_SCALE, v_scale=V_SCALE, window=10**6):
    """Attention in float64 over what the cache holds, written out."""

    def read(x, scale):
        quant = torch.tensor(1 / scale).bfloat16()
        codes = (x * quant).clamp(-240, 240).to(torch.float8_e4m3fn)
        return codes.double() / quant.double()

    key, value = read(key, k_scale), read(value, v_scale)
    rows = []
    first_key = first_query = 0
    for length, queries in zip(LENGTHS, QUERIES, strict=True):
        for i in range(queries):
            stop = length - queries + 1 + i
            start = max(0, stop - window)
            seen = slice(first_key + start, first_key + stop)
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                q = query[first_query + i, head].double()
                logits = key[seen, group] @ q / math.sqrt(SIZE)
                rows.append(logits.softmax(0) @ value[seen, group])
        first_key += length
        first_query += queries
    return torch.stack(rows).view(sum(QUERIES), HEADS, SIZE)


READERS = [
    pytest.param(False, id="ours"),
    pytest.param(
        True,
        id="upstream",
        marks=pytest.mark.skipif(
            not torch.cpu._is_avx512_supported(),
            reason="upstream's FP8 reader needs AVX-512",
        ),
    ),
]


def relative_error(out, reference):
    return ((out - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("upstream", READERS)
def test_attends_to_what_was_written(tokens, upstream):
    key, value, slots = tokens
    impl, kv_cache = implementation(), cache(torch.float8_e4m3fn)
    impl.do_kv_cache_update(None, key, value, kv_cache, slots)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(sum(QUERIES), HEADS, SIZE, generator=generator).bfloat16()
    out = torch.empty_like(query)
    impl.forward(None, query, None, None, kv_cache, metadata(upstream), out)
    right = relative_error(out.double(), expected(key, value, query))
    swapped = expected(key, value, query, V_SCALE, K_SCALE)
    # Rounding the output to bf16 alone is 2e-3; upstream also rounds P.
    assert right < 1e-2
    assert relative_error(out.double(), swapped) > 3e-2


def test_padding_is_not_written(tokens):
    key, value, slots = tokens
    impl, kv_cache = implementation(), cache(torch.float8_e4m3fn)
    impl.do_kv_cache_update(None, key, value, kv_cache, torch.full_like(slots, -1))
    assert not kv_cache.view(torch.uint8).any()


def test_a_sliding_window_hides_what_is_older(tokens):
    key, value, slots = tokens
    impl, kv_cache = implementation(), cache(torch.float8_e4m3fn)
    impl.do_kv_cache_update(None, key, value, kv_cache, slots)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(sum(QUERIES), HEADS, SIZE, generator=generator).bfloat16()
    impl.sliding_window = 8
    out = torch.empty_like(query)
    impl.forward(None, query, None, None, kv_cache, metadata(False), out)
    for window, near in ((7, False), (8, True), (9, False)):
        reference = expected(key, value, query, window=window)
        assert (relative_error(out.double(), reference) < 1e-2) == near
