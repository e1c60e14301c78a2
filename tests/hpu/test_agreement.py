# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""CPU backends and HPU pieces: the same bytes in the cache, the same attention."""

from types import SimpleNamespace

import pytest
import torch

from tests.device_numbers import MAXIMUM
from tests.hpu.scenes import BLOCK, batch_of, empty_cache, format_of, random, scales
from vllm.fp8_inc.attention.mha_cpu import CPUFp8Impl, planes
from vllm.fp8_inc.attention.mha_hpu import MHAPieces
from vllm.fp8_inc.attention.mla_cpu import CPUMLAImpl
from vllm.fp8_inc.attention.mla_hpu import MLAPieces
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

LENGTHS = [300, 128, 517]
LATENT, ROPE, HEADS, KV_HEADS, SIZE = 512, 64, 8, 2, 64
SCALE = 0.08
# The CPU quantises neither q nor P. Median over positions and channels, relative to the
# mean magnitude of the output.
BOUND = {"fp8": 0.05, "bf16": 0.008}


def block_tables(batch):
    longest = max(map(len, batch.tables))
    return torch.tensor(
        [table + [0] * (longest - len(table)) for table in batch.tables]
    )


def check(cpu, hpu, matmul):
    difference = (cpu.float() - hpu.float()).abs()
    assert difference.median() / cpu.float().abs().mean() < BOUND[matmul]


@pytest.mark.parametrize("matmul", BOUND)
@pytest.mark.parametrize("contiguous", [False, True])
def test_mla(device, contiguous, matmul):
    layer = scales(5 / MAXIMUM[device])
    batch = batch_of(LENGTHS, contiguous)
    latent = random(len(batch.slots), LATENT + ROPE, seed=1)
    query = random(len(LENGTHS), HEADS, LATENT + ROPE, seed=2)

    cpu = object.__new__(CPUMLAImpl)
    cpu.kv_lora_rank, cpu.scale, cpu.format = LATENT, SCALE, format_of(device)
    cpu.scales, cpu.qk_rope_head_dim = layer, ROPE
    cpu_cache = empty_cache(batch, LATENT + ROPE).view(-1, BLOCK, LATENT + ROPE)
    cpu.do_kv_cache_update(
        latent[:, :LATENT], latent[:, None, LATENT:], cpu_cache, batch.slots, "", None
    )
    decode = SimpleNamespace(
        seq_lens=torch.tensor(LENGTHS), block_table=block_tables(batch)
    )
    metadata = SimpleNamespace(decode=decode)
    expected, _ = cpu.forward_mqa(query, cpu_cache, metadata, None)

    pieces = MLAPieces(format_of(device), contiguous, matmul)
    pieces.load_scales(layer)
    cache = empty_cache(batch, LATENT + ROPE)
    pieces.latent_cache(latent, cache, batch.slots)
    assert torch.equal(
        cache.view(torch.uint8), cpu_cache.view(-1, LATENT + ROPE).view(torch.uint8)
    )
    out = pieces.decode.forward_decode(
        query=query,
        key_cache=cache[:, None],
        value_cache=None,
        scale=SCALE,
        kv_lora_rank=LATENT,
        **batch.decode_arguments(),
    )
    check(expected, out, matmul)


@pytest.mark.parametrize("matmul", BOUND)
@pytest.mark.parametrize("contiguous", [False, True])
def test_gqa(device, contiguous, matmul):
    layer = scales(5 / MAXIMUM[device], 14 / MAXIMUM[device], 6 / MAXIMUM[device])
    batch = batch_of(LENGTHS, contiguous)
    key = random(len(batch.slots), KV_HEADS, SIZE, seed=1)
    value = random(len(batch.slots), KV_HEADS, SIZE, seed=3) * 3
    query = random(len(LENGTHS), HEADS, SIZE, seed=2)

    cpu = object.__new__(CPUFp8Impl)
    cpu.head_size, cpu.scale, cpu.format, cpu.scales = (
        SIZE,
        SCALE,
        format_of(device),
        layer,
    )
    cpu.num_queries_per_kv, cpu.sliding_window = HEADS // KV_HEADS, -1
    cpu_cache = torch.zeros(
        batch.num_blocks, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.uint8
    ).view(torch.float8_e4m3fn)
    cpu.do_kv_cache_update(None, key, value, cpu_cache, batch.slots)
    metadata = CPUAttentionMetadata(
        num_actual_tokens=len(LENGTHS),
        max_query_len=1,
        query_start_loc=torch.arange(len(LENGTHS) + 1, dtype=torch.int32),
        max_seq_len=max(LENGTHS),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table=block_tables(batch),
        slot_mapping=batch.slots,
        scheduler_metadata=None,
    )
    expected = cpu.forward(
        None, query, None, None, cpu_cache, metadata, torch.empty_like(query)
    )

    pieces = MHAPieces(format_of(device), contiguous, matmul)
    pieces.load_scales(layer)
    k_cache, v_cache = (empty_cache(batch, KV_HEADS, SIZE) for _ in range(2))
    pieces.k_cache(key, k_cache, batch.slots)
    pieces.v_cache(value, v_cache, batch.slots)
    k_plane, v_plane = planes(cpu_cache, SIZE)
    for plane, cache in ((k_plane.mT, k_cache), (v_plane, v_cache)):
        rows = plane.transpose(1, 2).flatten(0, 1)[batch.slots]
        assert torch.equal(cache[batch.slots].view(torch.uint8), rows)
    out = pieces.decode.forward_decode(
        query=query[:, None].flatten(2),
        key_cache=k_cache,
        value_cache=v_cache,
        scale=SCALE,
        **batch.decode_arguments(),
    )
    check(expected, out, matmul)
