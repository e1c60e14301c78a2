# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Layers that keep an unquantised cache in an engine with --kv-cache-dtype fp8_inc.

Upstream's builder asks the engine, not its layers, whether the cache is FP8.
"""

import copy

import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec


class CPUUnquantizedBackend(CPUAttentionBackend):
    """Upstream's CPU backend for the layers that the FP8 cache leaves out."""

    @staticmethod
    def get_builder_cls() -> type["CPUUnquantizedMetadataBuilder"]:
        return CPUUnquantizedMetadataBuilder


class CPUUnquantizedMetadataBuilder(CPUAttentionMetadataBuilder):
    """Upstream's, told of an unquantised cache."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        config = copy.copy(vllm_config)
        config.cache_config = copy.copy(vllm_config.cache_config)
        config.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, config, device)
