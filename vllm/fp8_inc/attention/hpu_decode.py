# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Decode over paged FP8 blocks on HPU, for MLA and for MHA and GQA.

The FP8 cache goes straight into fp8_gemm_v2. Logits and softmax are float32, from the
accumulators; the sums over the blocks of a sequence are bfloat16 (sums of the softmax:
float32) and never FP8, whose range they exceed.

Each block attends for itself, relative to its own largest logit; then the blocks of a
sequence are weighted and summed. The sum is a product with zeros for the blocks of all
others, so that no NaN may come so far: a sequence that has one gets it back at the end.
"""

import torch
from torch import nn

from vllm.fp8_inc.attention.hpu_cache import Fp8KVCache
from vllm.fp8_inc.attention.hpu_scales import (
    DeviceScale,
    probability_scale,
    quantize_rows,
)
from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import AttentionScales, StaticScale

_SMALLEST = torch.finfo(torch.float32).tiny
_LOWEST = torch.finfo(torch.float32).min


class PagedDecode(nn.Module):
    """The decode of one attention layer.

    Args:
        k_cache: Of K, or of the latent.
        v_cache: Of V; None for MLA, whose V is the start of the latent.
        fmt: The format of the device.
        matmul: "fp8", or "bf16": FP8 is turned into bfloat16, exactly, before the
            two matrix products, and q and P are not quantised.
    """

    def __init__(
        self,
        k_cache: Fp8KVCache,
        v_cache: Fp8KVCache | None,
        fmt: Fp8Format,
        matmul: str = "fp8",
    ) -> None:
        super().__init__()
        self.k_cache = k_cache
        self.v_cache = v_cache
        self.format = fmt
        self.matmul = matmul
        self.q_scale: DeviceScale | None = None
        self.prob_scale = DeviceScale()

    def load_scales(self, scales: AttentionScales, q: StaticScale | None) -> None:
        """Takes the scales of q (None: each row by its amax) and of P.

        Those of K and V are the caches'.
        """
        self.prob_scale.load(probability_scale(scales, self.format))
        if q is None:
            self.q_scale = None
            return
        if self.q_scale is None:
            self.q_scale = DeviceScale().to(self.prob_scale.quant_scale.device)
        self.q_scale.load(q)

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor | None,
        block_list: torch.Tensor,
        block_mapping: torch.Tensor,
        block_bias: torch.Tensor,
        block_groups: torch.Tensor,
        block_size: int,
        scale: float,
        kv_lora_rank: int | None = None,
    ) -> torch.Tensor:
        """Attends with one query a sequence.

        Args:
            query: bfloat16 [batch, heads, dim].
            key_cache: FP8 [slots, kv_heads, dim]; MLA: kv_heads is 1.
            value_cache: FP8 [slots, kv_heads, value_dim]; None for MLA.
            block_list: [blocks], their ids.
            block_mapping: bfloat16 [blocks, batch], one-hot; padding: zeros.
            block_bias: [blocks, block_size], 0 or -inf.
            block_groups: [blocks], the sequence of each; padding: -1 or batch.
            block_size: Rows of a block.
            scale: Multiplies the logits.
            kv_lora_rank: Width of V within the latent; MLA only.

        Returns:
            bfloat16 [batch, heads, value_dim].
        """
        batch, heads, _ = query.shape
        kv_heads = key_cache.shape[1]
        key = self._blocks(self.k_cache, key_cache, block_list, block_size)
        if value_cache is None:
            value = key[..., :kv_lora_rank]
        else:
            value = self._blocks(self.v_cache, value_cache, block_list, block_size)
        groups = torch.where(block_groups < 0, batch, block_groups)
        rows = groups.clamp(max=batch - 1)  # what padding computes is dropped
        logits = self._logits(query, key, rows, kv_heads, scale)
        seen = (block_bias == 0)[:, None, None]
        usable = (logits.abs() < torch.inf) & seen  # NaN is not
        spoiled = (usable.sum(-1) < seen.sum(-1)).flatten(1)
        logits = torch.where(usable, logits, -torch.inf)
        maximum = logits.amax(-1, keepdim=True).clamp(min=_LOWEST)
        probabilities = (logits - maximum).exp()
        out = self._weighted_sum(probabilities, value)
        out = out * block_weights(
            maximum.flatten(1),
            probabilities.sum(-1).flatten(1),
            block_mapping,
            groups,
        ).view(maximum.shape).to(out.dtype)
        mapping = block_mapping.to(out.dtype).t()
        total = torch.matmul(mapping, out.flatten(1)).view(batch, heads, -1)
        spoiled = torch.matmul(mapping, spoiled.to(out.dtype)) > 0
        return total.masked_fill(spoiled.unsqueeze(-1), torch.nan)

    def _blocks(
        self, cache: Fp8KVCache, rows: torch.Tensor, block_list: torch.Tensor, size: int
    ) -> torch.Tensor:
        """Unscaled [blocks, kv_heads, block_size, dim]; FP8, or bfloat16.

        Every FP8 code has its exact value in bfloat16; scales follow the products.
        """
        blocks = cache.fetch_codes(rows.unflatten(0, (-1, size)), block_list)
        if self.matmul == "bf16":
            blocks = torch.ops.hpu.cast_from_fp8(blocks, None, torch.bfloat16)
        return blocks.transpose(1, 2)

    def _logits(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rows: torch.Tensor,
        kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        """float32 [blocks, kv_heads, heads / kv_heads, block_size]."""
        factor = per_head(self.k_cache.scale.dequant_scale, kv_heads) * scale
        if self.matmul == "bf16":
            picked = query.index_select(0, rows).unflatten(1, (kv_heads, -1))
            product = torch.matmul(picked, key.mT)
            return product.float() * factor
        if self.q_scale is None:
            codes, q_dequant = quantize_rows(query, self.format)
            q_dequant = q_dequant.index_select(0, rows).unflatten(1, (kv_heads, -1))
        else:
            codes = self.q_scale.quantize(query)
            q_dequant = per_head(self.q_scale.dequant_scale, kv_heads)
        picked = codes.index_select(0, rows).unflatten(1, (kv_heads, -1))
        return scaled_gemm(picked, key, True, factor * q_dequant, torch.float32)

    def _weighted_sum(
        self, probabilities: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """bfloat16 [blocks, kv_heads, heads / kv_heads, value_dim]."""
        kv_heads = value.shape[1]
        v_scale = (self.v_cache or self.k_cache).scale
        factor = per_head(v_scale.dequant_scale, kv_heads)
        if self.matmul == "bf16":
            out = torch.matmul(probabilities.bfloat16(), value)
            return (out.float() * factor).bfloat16()
        prob_quant = per_head(self.prob_scale.quant_scale, kv_heads)
        codes = torch.ops.hpu.cast_to_fp8_v2(
            probabilities, prob_quant, False, False, torch.float8_e4m3fn
        )[0]
        factor = factor * per_head(self.prob_scale.dequant_scale, kv_heads)
        return scaled_gemm(codes, value, False, factor, torch.bfloat16)

    def forward_decode(self, **kwargs) -> torch.Tensor:
        """Takes the arguments of the worker's HPUPagedAttention.forward_decode.

        Raises:
            NotImplementedError: For attention sinks, ALiBi and dynamic KV scales.
        """
        for name in ("sinks", "position_bias", "k_scales", "v_scales"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(
                    f"--kv-cache-dtype fp8_inc on HPU does not support {name}; serve "
                    "with --kv-cache-dtype auto"
                )
        query = kwargs["query"]
        names = (
            "key_cache", "value_cache", "block_list", "block_mapping", "block_bias",
            "block_groups", "block_size", "scale",
        )  # fmt: skip
        head_size = kwargs["key_cache"].shape[-1]
        return self(
            query.reshape(query.shape[0], -1, head_size),
            **{name: kwargs[name] for name in names},
            kv_lora_rank=kwargs.get("kv_lora_rank"),
        )


def per_head(scale: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Lets a scale [] or [heads] broadcast to [..., kv_heads, group, any]."""
    return scale.view(kv_heads, -1, 1) if scale.dim() else scale


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    trans_b: bool,
    dequant_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(a @ b) * dequant_scale over FP8, in float32 up to the last rounding.

    Args:
        a: FP8 [..., M, K].
        b: FP8 [..., K, N], or [..., N, K] with ``trans_b``.
        dequant_scale: float32; 0-d goes into the operator, which takes no other
            for batches; else it broadcasts to the product and follows it.
        dtype: Of the result.
    """
    if dequant_scale.dim() == 0:
        return torch.ops.hpu.fp8_gemm_v2(
            a, False, b, trans_b, None, dtype, dequant_scale, None, None, False
        )
    product = torch.ops.hpu.fp8_gemm_v2(
        a, False, b, trans_b, None, torch.float32, None, None, None, False
    )
    return (product * dequant_scale).to(dtype)


def block_weights(
    maximum: torch.Tensor,
    sums: torch.Tensor,
    block_mapping: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """What each block's output is multiplied by before the sum over a sequence.

    exp(own maximum - the sequence's) / (sum of the softmax over the sequence).

    Args:
        maximum: float32 [blocks, heads], the largest logit of each block.
        sums: float32 [blocks, heads], of exp(logit - maximum).
        block_mapping: [blocks, batch], one-hot; padding: zeros.
        groups: [blocks], the sequence of each block; padding: batch.

    Returns:
        float32 [blocks, heads].
    """
    batch = block_mapping.shape[1]
    largest = maximum.new_full((batch + 1, maximum.shape[1]), _LOWEST)
    largest.index_reduce_(0, groups, maximum, "amax")
    adjustment = (maximum - largest.index_select(0, groups)).exp()
    own = sums * adjustment
    mapping = block_mapping.float()
    total = torch.matmul(mapping, torch.matmul(mapping.t(), own))
    # Padding has no total; it must not become 0 / 0, which zeros do not mask.
    return adjustment / torch.maximum(total, own).clamp(min=_SMALLEST)
