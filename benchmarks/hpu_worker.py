# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A minimal model of the decode of vllm-gaudi 091bbadd, for comparison.

Which operators run, in which order, on which operands and with which scales; written
from a description of the worker, with its defects. Where a checkout is at hand, the
tests run the worker's own code beside it (tests/hpu/test_worker_code.py).
"""

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn


@dataclass
class WorkerCache:
    """The worker's KV cache.

    Attributes:
        quant_scale: Of what is written; None: a bfloat16 cache.
        contiguous: Whether every fetch takes the first blocks, asked for or not.
    """

    quant_scale: torch.Tensor | None
    contiguous: bool

    def write(
        self, rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        if self.quant_scale is None:
            cache[slots] = rows
            return
        codes = torch.ops.hpu.cast_to_fp8_v2(rows, self.quant_scale, False, False, FP8)
        cache.view(torch.uint8)[slots] = codes[0].view(torch.uint8)

    def fetch(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Every block that is read becomes bfloat16."""
        if self.contiguous:
            fetched = cache.narrow(0, 0, blocks.shape[0])
        else:
            fetched = cache.index_select(0, blocks)
        if self.quant_scale is None:
            return fetched
        return torch.ops.hpu.cast_from_fp8(
            fetched, 1 / self.quant_scale, torch.bfloat16
        )


@dataclass
class WorkerMatmul:
    """The worker's matrix product: quantises both operands, or is a plain one.

    Attributes:
        quant_scales: Of both operands; None: bfloat16.
    """

    quant_scales: tuple[torch.Tensor, torch.Tensor] | None

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.quant_scales is None:
            return torch.matmul(x, y)
        codes = [
            torch.ops.hpu.cast_to_fp8_v2(operand, scale, False, False, FP8)[0]
            for operand, scale in zip((x, y), self.quant_scales)
        ]
        inverse = [1 / scale for scale in self.quant_scales]
        # ``out``, a float32 buffer where fp32_softmax is set, is not looked at.
        return torch.ops.hpu.fp8_gemm_v2(
            codes[0], False, codes[1], False, None, torch.bfloat16, *inverse
        )


@dataclass
class WorkerDecode:
    """The decode of one layer.

    Attributes:
        k_cache: Of K or of the latent.
        v_cache: Of V; None for MLA.
        qk: The product of q and K.
        pv: The product of P and V.
        over_blocks: The products with block_mapping.
    """

    k_cache: WorkerCache
    v_cache: WorkerCache | None
    qk: WorkerMatmul
    pv: WorkerMatmul
    over_blocks: WorkerMatmul

    @classmethod
    def fp8(
        cls,
        q_quant: float,
        k_quant: float,
        v_quant: float,
        contiguous: bool,
        mla: bool,
    ) -> "WorkerDecode":
        """The worker with an fp8_inc cache: P and the sums over blocks at 1.0."""
        one, q, k, v = (torch.tensor(s) for s in (1.0, q_quant, k_quant, v_quant))
        return cls(
            WorkerCache(k, contiguous),
            None if mla else WorkerCache(v, contiguous),
            WorkerMatmul((q, k)),
            WorkerMatmul((one, v)),
            WorkerMatmul((one, one)),
        )

    @classmethod
    def bf16(cls, contiguous: bool, mla: bool) -> "WorkerDecode":
        """The worker with a bfloat16 cache."""
        cache, plain = WorkerCache(None, contiguous), WorkerMatmul(None)
        return cls(cache, None if mla else cache, plain, plain, plain)

    def _over_blocks(self, mapping: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.over_blocks(mapping, x.flatten(1)).view(-1, *x.shape[1:])

    def __call__(
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
        """Arguments and result as those of attention/hpu_decode.py's PagedDecode."""
        batch, heads, _ = query.shape
        kv_heads = key_cache.shape[1]
        query = self._over_blocks(block_mapping, query * scale)
        query = query.unflatten(1, (kv_heads, -1)).unsqueeze(3)
        key = self.k_cache.fetch(key_cache.unflatten(0, (-1, block_size)), block_list)
        if value_cache is None:
            value = key[..., :kv_lora_rank]
        else:
            blocks = value_cache.unflatten(0, (-1, block_size))
            value = self.v_cache.fetch(blocks, block_list)
        key = key.transpose(1, 2).unsqueeze(2).mT
        value = value.transpose(1, 2).unsqueeze(2)
        logits = self.qk(query, key) + block_bias[:, None, None, None]
        maximum = logits.amax(-1, keepdim=True)
        probabilities = (logits - maximum).exp()
        sums = probabilities.sum(-1, keepdim=True)
        out = self.pv(probabilities, value)
        weights = self._weights(maximum, sums, block_mapping, block_groups)
        out = self._over_blocks(block_mapping.t(), out * weights)
        return out.view(batch, heads, -1)

    def _weights(
        self,
        maximum: torch.Tensor,
        sums: torch.Tensor,
        mapping: torch.Tensor,
        groups: torch.Tensor,
    ) -> torch.Tensor:
        batch = mapping.shape[1]
        groups = torch.where(groups < 0, batch, groups)
        flat, sums = maximum.flatten(1), sums.flatten(1)
        largest = flat.new_full((batch + 1, flat.shape[1]), -torch.inf)
        largest.index_reduce_(0, groups, flat, "amax")
        adjustment = (flat - largest.index_select(0, groups)).exp()
        own = sums * adjustment
        total = self._over_blocks(mapping, self._over_blocks(mapping.t(), own))
        return (adjustment / torch.maximum(total, own)).view(maximum.shape)
