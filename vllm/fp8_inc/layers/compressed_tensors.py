# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""compressed-tensors checkpoints on CPU: FP8 W8A8 static goes to our layers.

Everything else stays upstream's. Registered in place of upstream's class by
plugin.py, on CPU only.
"""

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.fp8_inc.adjustment import Adjustment, resolve_adjustment
from vllm.fp8_inc.layers.linear import Fp8StaticLinearScheme
from vllm.fp8_inc.layers.moe import Fp8StaticMoEMethod
from vllm.fp8_inc.settings import Settings
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
)
from vllm.utils.torch_utils import is_quantized_kv_cache


class Fp8IncCompressedTensorsConfig(CompressedTensorsConfig):
    """Upstream's configuration, with FP8-static layers that run on CPU."""

    @property
    def kv_cache_scheme(self) -> dict[str, Any] | None:
        """The scheme of the checkpoint, while upstream serves the cache.

        Hidden otherwise: upstream's Attention reads "auto" as "fp8" where it sees
        one, and loading.py loads the scales of an fp8_inc cache.
        """
        return self._kv_cache_scheme if _upstream_serves_cache() else None

    @kv_cache_scheme.setter
    def kv_cache_scheme(self, scheme: dict[str, Any] | None) -> None:
        self._kv_cache_scheme = scheme

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        if isinstance(layer, Attention) and not _upstream_serves_cache():
            return None
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            scheme = self.get_scheme_dict(layer, f"{prefix}.0.gate_proj") or {}
            weights, inputs = scheme.get("weights"), scheme.get("input_activations")
            if _is_fp8_static(weights, inputs):
                return Fp8StaticMoEMethod(
                    weights, inputs, layer, self._adjustment(), prefix
                )
        return super().get_quant_method(layer, prefix)

    def _get_scheme_from_parts(
        self,
        weight_quant: QuantizationArgs,
        input_quant: QuantizationArgs,
        output_quant: QuantizationArgs | None = None,
        format: str | None = None,
        layer_name: str | None = None,
    ) -> CompressedTensorsScheme:
        if _is_fp8_static(weight_quant, input_quant):
            return Fp8StaticLinearScheme(
                weight_quant.strategy, self._adjustment(), layer_name or ""
            )
        return super()._get_scheme_from_parts(
            weight_quant, input_quant, output_quant, format, layer_name
        )

    def _adjustment(self) -> Adjustment:
        settings = Settings.of(get_current_vllm_config())
        return resolve_adjustment(self.config, settings.format)


def _upstream_serves_cache() -> bool:
    """Whether the KV cache is quantised, and not as fp8_inc."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return True
    dtype = config.cache_config.cache_dtype
    return is_quantized_kv_cache(dtype) and dtype != "fp8_inc"


def _is_fp8_static(
    weights: QuantizationArgs | None, inputs: QuantizationArgs | None
) -> bool:
    """Whether this is W8A8 FP8 with static per-tensor activations."""
    return (
        CompressedTensorsConfig._is_fp8_w8a8(weights, inputs)
        and weights.num_bits == inputs.num_bits == 8
        and not inputs.dynamic
        and weights.strategy
        in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL)
    )
