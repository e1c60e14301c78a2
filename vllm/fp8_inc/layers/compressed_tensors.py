# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""compressed-tensors checkpoints on CPU: FP8 W8A8 goes to our layers.

Everything else stays upstream's.
"""

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from vllm.fp8_inc.layers.linear import Fp8LinearScheme
from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.layers.served import ServedOnCpu, upstream_serves_cache
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
)


class Fp8IncCompressedTensorsConfig(ServedOnCpu, CompressedTensorsConfig):
    """Upstream's configuration, with FP8 layers that run on CPU."""

    @property
    def kv_cache_scheme(self) -> dict[str, Any] | None:
        """The scheme of the checkpoint, while upstream serves the cache.

        Hidden otherwise: upstream's Attention reads "auto" as "fp8" where it sees
        one, and loading.py loads the scales of an fp8_inc cache.
        """
        return self._kv_cache_scheme if upstream_serves_cache() else None

    @kv_cache_scheme.setter
    def kv_cache_scheme(self, scheme: dict[str, Any] | None) -> None:
        self._kv_cache_scheme = scheme

    def recipe_of(self, layer: torch.nn.Module, prefix: str) -> Fp8Recipe | None:
        if not isinstance(layer, RoutedExperts):
            return None  # upstream asks for a scheme, below
        self._add_fused_moe_to_target_scheme_map()
        scheme = self.get_scheme_dict(layer, f"{prefix}.0.gate_proj") or {}
        weights, inputs = scheme.get("weights"), scheme.get("input_activations")
        return self._recipe(weights, inputs) if _is_fp8(weights, inputs) else None

    def _get_scheme_from_parts(
        self,
        weight_quant: QuantizationArgs,
        input_quant: QuantizationArgs,
        output_quant: QuantizationArgs | None = None,
        format: str | None = None,
        layer_name: str | None = None,
    ) -> CompressedTensorsScheme:
        if _is_fp8(weight_quant, input_quant):
            recipe = self._recipe(weight_quant, input_quant)
            return Fp8LinearScheme(recipe, layer_name or "")
        return super()._get_scheme_from_parts(
            weight_quant, input_quant, output_quant, format, layer_name
        )

    def _recipe(self, weights: QuantizationArgs, inputs: QuantizationArgs) -> Fp8Recipe:
        return Fp8Recipe(
            QuantizationStrategy(weights.strategy).value,
            static_inputs=not inputs.dynamic,
            adjustment=self.adjustment(),
            block=tuple(weights.block_structure or (128, 128)),
        )


def _is_fp8(weights: QuantizationArgs | None, inputs: QuantizationArgs | None) -> bool:
    """Whether this is W8A8 FP8 with activations that are static or dynamic."""
    if not CompressedTensorsConfig._is_fp8_w8a8(weights, inputs):
        return False
    if weights.num_bits != 8 or inputs.num_bits != 8:
        return False
    if not inputs.dynamic:
        return weights.strategy != QuantizationStrategy.BLOCK
    return inputs.dynamic is True and inputs.symmetric
