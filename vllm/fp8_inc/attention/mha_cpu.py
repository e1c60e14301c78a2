# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MHA and GQA on CPU over an FP8 cache.

Our writer rounds to nearest even with the device's product; upstream's truncates
towards zero. Upstream's reader serves where it has FP8 kernels (AVX-512); elsewhere,
and for scales per head, ours do in float32: a kernel for requests with one query, torch
for prefill. All read the one layout: inside a block of a head K is
[head_size, block_size], V is [block_size, head_size].
"""

from functools import cached_property
from types import SimpleNamespace
from typing import ClassVar

import torch

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.fp8_inc.attention.cache import MadeFor, decode_from_cache, storage
from vllm.fp8_inc.attention.dense import causal_attention
from vllm.fp8_inc.attention.kernels.gqa import decode_heads
from vllm.fp8_inc.attention.kernels.gqa import load as load_decode
from vllm.fp8_inc.attention.kernels.writers import (
    HeadsWriter,
    heads_of_gqa,
)
from vllm.fp8_inc.scales import AttentionScales
from vllm.fp8_inc.settings import Settings
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

logger = init_logger(__name__)

# What upstream's kernels call this cache, and the kernels that read the layout.
_UPSTREAM_DTYPE = "fp8_e4m3"
_UPSTREAM_ISA = "vec"


def upstream_reads(vllm_config: VllmConfig, head_size: int) -> bool:
    """Whether upstream's kernels can read this cache on this CPU."""
    return (
        torch.cpu._is_avx512_supported()
        and vllm_config.cache_config.block_size % 32 == 0
        and head_size % 32 == 0
    )


def planes(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views the cache as K and V.

    Args:
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size] FP8.
        head_size: Of K and of V.

    Returns:
        K [blocks, kv_heads, head_size, block_size] and
        V [blocks, kv_heads, block_size, head_size], uint8.
    """
    blocks, heads, block_size, _ = kv_cache.shape
    halves = storage(kv_cache).view(blocks, heads, 2, block_size * head_size)
    key = halves[:, :, 0].unflatten(-1, (head_size, block_size))
    return key, halves[:, :, 1].unflatten(-1, (block_size, head_size))


class CPUFp8Backend(CPUAttentionBackend):
    """Upstream's CPU backend with an fp8_inc cache."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["fp8_inc"]

    @staticmethod
    def get_impl_cls() -> type["CPUFp8Impl"]:
        return CPUFp8Impl

    @staticmethod
    def get_builder_cls() -> type["CPUFp8MetadataBuilder"]:
        return CPUFp8MetadataBuilder


class CPUFp8MetadataBuilder(CPUAttentionMetadataBuilder):
    """Upstream's metadata, without its schedule where its reader cannot serve."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        self.upstream_reads = upstream_reads(vllm_config, kv_cache_spec.head_size)
        if not self.upstream_reads:
            # Not the parent's, which raises on this CPU.
            AttentionMetadataBuilder.__init__(
                self, kv_cache_spec, layer_names, vllm_config, device
            )
            return
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.kv_cache_dtype = _UPSTREAM_DTYPE
        self.isa = _UPSTREAM_ISA

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        if self.upstream_reads:
            return super().build(common_prefix_len, common, fast_build)
        if common.causal is not True:
            raise NotImplementedError(
                "--kv-cache-dtype fp8_inc on this CPU serves causal attention only"
            )
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )


class CPUFp8Impl(CPUAttentionBackendImpl):
    """Writes FP8 with the device's numbers; reads with upstream's or our kernel."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args,
        **kwargs,
    ) -> None:
        # "auto": the parent raises for FP8 on CPUs without AVX-512.
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            "auto",
            *args,
            **kwargs,
        )
        self.kv_cache_dtype = _UPSTREAM_DTYPE
        self.is_fp8_kv_cache = True
        self.isa = _UPSTREAM_ISA
        if head_size % 16:
            raise NotImplementedError(
                "--kv-cache-dtype fp8_inc on CPU needs a head size that is a multiple "
                f"of 16, not {head_size}; serve with --kv-cache-dtype auto"
            )
        heads_of_gqa.compile()
        vllm_config = get_current_vllm_config()
        self.format = Settings.of(vllm_config).format
        self.scales: AttentionScales | None = None
        if not upstream_reads(vllm_config, head_size):
            logger.info_once(
                "fp8_inc: upstream's FP8 attention kernel needs AVX-512 and block and "
                "head sizes that are multiples of 32; a plain float32 reader serves"
            )
            self._check_plain_reader("on this CPU")
            load_decode()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Checks that scales per head, which upstream's kernel has not, can be read."""
        super().process_weights_after_loading(act_dtype)
        if self._per_head:
            self._check_plain_reader("with scales per head")
            load_decode()

    @property
    def _per_head(self) -> bool:
        return self.scales.k.per_head or self.scales.v.per_head

    def _check_plain_reader(self, where: str) -> None:
        unsupported = {
            "ALiBi": self.alibi_slopes,
            "a logits soft cap": self.logits_soft_cap or None,
            "attention sinks": self.sinks,
        }
        for what, value in unsupported.items():
            if value is not None:
                raise NotImplementedError(
                    f"--kv-cache-dtype fp8_inc {where} does not support {what}; "
                    "serve with --kv-cache-dtype auto"
                )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes K and V.

        Args:
            layer: Unused: scales are in ``scales``.
            key: [tokens, kv_heads, head_size], after RoPE.
            value: [tokens, kv_heads, head_size].
            kv_cache: [blocks, kv_heads, block_size, 2 * head_size].
            slot_mapping: [tokens], -1 for padding.
        """
        self._writer(kv_cache, self.scales).write(key, value, slot_mapping)

    @cached_property
    def _writer(self) -> MadeFor[HeadsWriter]:
        return MadeFor(self._make_writer)

    def _make_writer(self, cache: torch.Tensor) -> HeadsWriter:
        k, v = self.scales.k.quant_scale, self.scales.v.quant_scale
        return HeadsWriter(cache, k, v, self.format)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends to what the cache holds.

        Args:
            layer: Unused: scales are in ``scales``.
            query: [tokens, heads, head_size].
            key: Unused: read from the cache.
            value: Unused, as key.
            kv_cache: [blocks, kv_heads, block_size, 2 * head_size].
            attn_metadata: Of this batch; None while vLLM warms up.
            output: [tokens, heads, head_size], written.
            output_scale: Must be None: no quantised output on CPU.
            output_block_scale: Must be None.

        Returns:
            ``output``.
        """
        if attn_metadata is None:
            return output
        if attn_metadata.scheduler_metadata is not None and not self._per_head:
            scales = SimpleNamespace(
                _k_scale_float=self.scales.k.dequant_scale.item(),
                _v_scale_float=self.scales.v.dequant_scale.item(),
            )
            return super().forward(
                scales,
                query,
                key,
                value,
                storage(kv_cache),
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        self._decode(query, kv_cache, attn_metadata, output)
        starts = attn_metadata.query_start_loc.tolist()
        for request, length in enumerate(attn_metadata.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            if rows.stop - rows.start == 1:
                continue
            k, v = self._read(kv_cache, attn_metadata.block_table[request], length)
            out = causal_attention(query[rows], k, v, self.scale, self._window)
            output[rows] = out.to(output.dtype)
        return output

    @property
    def _window(self) -> int | None:
        return self.sliding_window if self.sliding_window > 0 else None

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Serves the requests that have one query."""
        starts = attn_metadata.query_start_loc
        requests = (starts.diff() == 1).nonzero().flatten()
        if not len(requests):
            return
        rows = starts[requests].long()
        output[rows] = decode_heads(
            query[rows],
            storage(kv_cache),
            attn_metadata.block_table[requests],
            attn_metadata.seq_lens[requests],
            self.scale,
            self.scales.k.dequant_scale,
            self.scales.v.dequant_scale,
            self.format,
            self._window,
        )

    def _read(
        self, kv_cache: torch.Tensor, block_table: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of a sequence, float32 [length, heads, head_size]."""
        blocks = block_table[: -(-length // kv_cache.shape[2])].long()
        k_plane, v_plane = planes(kv_cache, self.head_size)
        key = k_plane[blocks].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        value = v_plane[blocks].transpose(1, 2).flatten(0, 1)[:length]
        groups = self.num_queries_per_kv
        return (
            decode_from_cache(key, self.scales.k, self.format).repeat_interleave(
                groups, dim=1
            ),
            decode_from_cache(value, self.scales.v, self.format).repeat_interleave(
                groups, dim=1
            ),
        )
