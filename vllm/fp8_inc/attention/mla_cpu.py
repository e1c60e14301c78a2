# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MLA on CPU, as vLLM sees it: the backend, and what a batch is."""

from typing import ClassVar

import torch

from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.fp8_inc.attention.mla_cpu_impl import CPUMLAImpl
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.kv_cache_interface import AttentionSpec


class CPUMLABackend(MLACommonBackend):
    """Any latent and rope size, any block size that is a multiple of 16."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "bfloat16",
        "fp8_inc",
    ]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_impl_cls() -> type["CPUMLAImpl"]:
        return CPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type["CPUMLAMetadataBuilder"]:
        return CPUMLAMetadataBuilder


class CPUMLAMetadata(MLACommonMetadata):
    """Upstream's, for any latent size."""

    # Tokens of the batch that are decoded, which come first.
    decoded = 0

    def __post_init__(self) -> None:
        pass


class CPUMLAMetadataBuilder(MLACommonMetadataBuilder[CPUMLAMetadata]):
    """Upstream's: splits a batch into decodes and prefills."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, CPUMLAMetadata
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUMLAMetadata:
        """Upstream's, but the layer gives all tokens to ``CPUMLAImpl.forward_mha``.

        Else it would absorb kv_b_proj itself, with torch.bmm in bfloat16.
        """
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.decoded, metadata.num_decode_tokens = metadata.num_decode_tokens, 0
        return metadata


class CPUMLAPrefillBackend(MLAPrefillBackend):
    """Stands where vLLM wants a prefill kernel; CPUMLAImpl.forward_mha is ours."""

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA_PREFILL"

    def run_prefill_new_tokens(self, *args, **kwargs):
        raise NotImplementedError("CPUMLAImpl.forward_mha prefills by itself")

    def run_prefill_context_chunk(self, *args, **kwargs):
        raise NotImplementedError("CPUMLAImpl.forward_mha prefills by itself")
