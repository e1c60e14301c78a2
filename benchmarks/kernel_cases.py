# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What ``benchmarks.kernels`` compares: upstream's call and ours, on equal values."""

from collections.abc import Callable

import torch

LATENT, ROPE, BLOCK = 512, 64, 16
LOGIT_SCALE = 192**-0.5
DEQUANT_SCALE = 0.02


def _as_bf16(codes: torch.Tensor) -> torch.Tensor:
    """What codes stand for, in parts: float32 of a whole cache would fill memory."""
    from vllm.fp8_inc.formats import GAUDI3

    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    for part, target in zip(codes.split(1024), out.split(1024)):
        target.copy_(GAUDI3.decode(part) * DEQUANT_SCALE)
    return out


def decode_case(batch: int, context: int, heads: int) -> tuple[Callable, Callable]:
    """Upstream's and our decode of MLA on the same values."""
    from vllm import _custom_ops as ops
    from vllm.fp8_inc.attention.kernels.mla import decode_latents
    from vllm.fp8_inc.formats import GAUDI3

    size = LATENT + ROPE
    per_sequence = -(-context // BLOCK)
    order = torch.randperm(batch * per_sequence)
    table = order.view(batch, per_sequence).int()
    lengths = torch.full((batch,), context, dtype=torch.int32)
    codes = torch.randint(0x70, (batch * per_sequence, BLOCK, size), dtype=torch.uint8)
    bf16 = _as_bf16(codes)
    query = torch.randn(batch, heads, size).bfloat16() * 0.1
    out = torch.empty(batch, heads, LATENT, dtype=torch.bfloat16)
    parts = query.split([LATENT, ROPE], dim=-1)

    def upstream() -> None:
        ops.mla_decode_kvcache_cpu(out, query, bf16, LOGIT_SCALE, table, lengths)

    def ours() -> None:
        decode_latents(
            *parts, codes, table, lengths, LOGIT_SCALE, DEQUANT_SCALE, GAUDI3
        )

    return upstream, ours


def heads_decode_case(batch: int, context: int) -> tuple[Callable, Callable]:
    """Upstream's bf16 decode and ours; 32 heads, 8 kv heads of 128, blocks of 32."""
    from vllm import _custom_ops as ops
    from vllm.fp8_inc.attention.kernels.gqa import decode_heads
    from vllm.fp8_inc.formats import GAUDI3

    heads, kv_heads, size, block = 32, 8, 128, 32
    per_sequence = -(-context // block)
    blocks = batch * per_sequence
    table = torch.randperm(blocks).view(batch, per_sequence).int()
    lengths = torch.full((batch,), context, dtype=torch.int32)
    codes = torch.randint(0x70, (blocks, kv_heads, block, 2 * size), dtype=torch.uint8)
    values = _as_bf16(codes)
    planes = values.view(blocks, kv_heads, 2 * block, size).chunk(2, dim=2)
    query = torch.randn(batch, heads, size).bfloat16()
    out = torch.empty_like(query)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    scale = torch.tensor(DEQUANT_SCALE)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        seq_lens=lengths,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
    )

    def upstream() -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=planes[0],
            value_cache=planes[1],
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )

    def ours() -> None:
        decode_heads(query, codes, table, lengths, size**-0.5, scale, scale, GAUDI3)

    return upstream, ours


def absorb_case(tokens: int, heads: int = 16) -> tuple[Callable, Callable]:
    """Decode's products with W_UK and W_UV: torch.bmm in bf16, and ours in float32."""
    from vllm.fp8_inc.attention.kernels.absorb import from_latent, to_latent

    nope = value = 128
    weight = torch.randn(heads * (nope + value), LATENT).bfloat16() / LATENT**0.5
    halves = weight.T.view(LATENT, heads, nope + value).split([nope, value], -1)
    w_uk, w_uv = halves[0].permute(1, 2, 0), halves[1].transpose(0, 1)
    query = torch.randn(tokens, heads, nope + ROPE).bfloat16()[..., :nope]
    attended = torch.randn(tokens, heads, LATENT).bfloat16()
    absorbed = torch.empty(heads, tokens, LATENT, dtype=torch.bfloat16)
    out = torch.empty(tokens, heads, value, dtype=torch.bfloat16)

    def upstream() -> None:
        torch.bmm(query.transpose(0, 1), w_uk, out=absorbed)
        torch.bmm(attended.transpose(0, 1), w_uv, out=out.transpose(0, 1))

    def ours() -> None:
        to_latent(query, w_uk)
        from_latent(attended, w_uv)

    return upstream, ours


def latent_write_case(tokens: int) -> tuple[Callable, Callable]:
    """Upstream's write of bf16 latents by torch indexing, and our cast and write."""
    from vllm.fp8_inc.attention.kernels.writers import LatentWriter
    from vllm.fp8_inc.formats import GAUDI3

    latent = torch.randn(tokens, LATENT).bfloat16()
    rope = torch.randn(tokens, ROPE).bfloat16()
    slots = torch.randperm(40_000)[:tokens]
    bf16 = torch.zeros(40_000, LATENT + ROPE, dtype=torch.bfloat16)
    codes = torch.zeros(40_000 // BLOCK, BLOCK, LATENT + ROPE, dtype=torch.uint8)

    def upstream() -> None:
        valid = slots >= 0
        if valid.all().item():
            bf16[slots, :LATENT] = latent
            bf16[slots, LATENT:] = rope

    writer = LatentWriter(codes, LATENT, 3.0, GAUDI3)

    def ours(cache: torch.Tensor = codes) -> None:
        writer.write(latent, rope, slots)

    return upstream, ours


def heads_write_case(tokens: int) -> tuple[Callable, Callable]:
    """Upstream's write of bf16 K and V, and our cast and write; 8 heads of 128."""
    from vllm import _custom_ops as ops
    from vllm.fp8_inc.attention.kernels.writers import HeadsWriter
    from vllm.fp8_inc.formats import GAUDI3

    heads, size, block, blocks = 8, 128, 32, 80
    key, value = torch.randn(2, tokens, heads, size).bfloat16().unbind()
    slots = torch.arange(tokens) + 7 * block
    bf16 = torch.zeros(blocks, heads, 2 * block, size, dtype=torch.bfloat16)
    planes = bf16.chunk(2, dim=2)
    codes = torch.zeros(blocks, heads, block, 2 * size, dtype=torch.uint8)
    writer = HeadsWriter(codes, torch.ones(()), torch.ones(()), GAUDI3)

    def upstream() -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *planes, slots, "vec")

    def ours(cache: torch.Tensor = codes) -> None:
        writer.write(key, value, slots)

    return upstream, ours


def prefill_case(tokens: int, heads: int = 16) -> tuple[Callable, Callable]:
    """Upstream's bf16 attention on expanded K and padded V, and ours in float32."""
    import torch.nn.functional as F

    from vllm.fp8_inc.attention.dense import Joined

    query, key = torch.randn(2, tokens, heads, 192).bfloat16().unbind()
    value = torch.randn(tokens, heads, 128).bfloat16()

    def upstream() -> None:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, F.pad(value, (0, 64))))
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=LOGIT_SCALE)

    def ours() -> None:
        attention = Joined(query, LOGIT_SCALE, 128)
        attention.attend(key, value, causal=True)

    return upstream, ours
