# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``quant_method: quark`` on CPU."""

from typing import Any

import torch

from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.layers.served import ServedOnCpu
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

_WEIGHTS = {"per_tensor": "tensor", "per_channel": "channel", "per_block": "block"}


class Fp8IncQuarkConfig(ServedOnCpu, QuarkConfig):
    """Upstream's configuration, with FP8 layers that run on CPU."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8IncQuarkConfig":
        # Upstream looks for a class where Quark writes its name, and finds nothing.
        # Only Linear layers, experts' too, are looked up.
        linear = (config.get("layer_type_quant_config") or {}).get("Linear")
        return super().from_config(
            config | {"global_quant_config": linear} if linear else config
        )

    def recipe_of(self, layer: torch.nn.Module, prefix: str) -> Fp8Recipe | None:
        experts = isinstance(layer, RoutedExperts)
        if isinstance(layer, ParallelLMHead) or should_ignore_layer(
            prefix,
            ignore=self.quant_config["exclude"],
            fused_mapping=self.packed_modules_mapping,
            check_children=experts,
        ):
            return None
        found = self._find_matched_config(prefix, layer)
        if experts and found == self.quant_config["global_quant_config"]:
            # A pattern may name the projections and not the module that holds them.
            found = self._find_matched_config(f"{prefix}.0.gate_proj", layer)
        weights, inputs = found.get("weight"), found.get("input_tensors")
        others = found.get("output_tensors") or found.get("bias")
        if others or not self._is_fp8_w8a8(weights, inputs):
            return None
        kind = _WEIGHTS[weights["qscheme"]]
        return Fp8Recipe(
            kind,
            static_inputs=not inputs.get("is_dynamic"),
            adjustment=self.adjustment(),
            scale_name="weight_scale_inv" if kind == "block" else "weight_scale",
        )
