# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``quant_method: fp8`` on CPU: AutoFP8 and the official DeepSeek-V3/R1 checkpoints.

Layers that the checkpoint left unquantised, and models that vLLM quantises itself
while loading, stay upstream's. Registered in place of upstream's class by
plugin.py, on CPU only.
"""

from typing import Any

import torch

from vllm.fp8_inc.layers.linear import Fp8LinearScheme
from vllm.fp8_inc.layers.moe import Fp8MoEMethod
from vllm.fp8_inc.layers.recipe import (
    Fp8Recipe,
    ServedOnCpu,
    upstream_serves_cache,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped


class Fp8IncFp8Config(ServedOnCpu, Fp8Config):
    """Upstream's configuration, with FP8 layers that run on CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config: dict[str, Any] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8IncFp8Config":
        loaded = super().from_config(config)
        loaded.config = config
        return loaded

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        if isinstance(layer, Attention) and not upstream_serves_cache():
            return None
        if not self._is_ours(layer, prefix):
            return super().get_quant_method(layer, prefix)
        recipe = self._recipe()
        if isinstance(layer, RoutedExperts):
            return Fp8MoEMethod(recipe, layer, prefix)
        layer.scheme = Fp8LinearScheme(recipe, prefix)
        # Upstream's method of this name only calls the scheme.
        return CompressedTensorsLinearMethod(self)

    def _is_ours(self, layer: torch.nn.Module, prefix: str) -> bool:
        return (
            isinstance(layer, (LinearBase, RoutedExperts))
            and self.is_checkpoint_fp8_serialized
            and self.store_dtype is None
            and not is_layer_skipped(
                prefix=prefix,
                ignored_layers=self.ignored_layers,
                fused_mapping=self.packed_modules_mapping,
                match_mode=self.ignored_layers_match_mode,
            )
        )

    def _recipe(self) -> Fp8Recipe:
        adjustment = self.adjustment_for(self.config)
        if self.weight_block_size is None:
            static = self.activation_scheme == "static"
            return Fp8Recipe("tensor", static, adjustment)
        rows, columns = self.weight_block_size
        return Fp8Recipe(
            "block", False, adjustment, (rows, columns), "weight_scale_inv"
        )
