# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the quantisation configs have in common whose FP8 layers are ours on CPU.

Each ``quant_method`` has a file here with a subclass of upstream's configuration,
which plugin.py registers in its place, on CPU only. Upstream reads config.json and
knows which layers are quantised; what is not W8A8 FP8 stays upstream's.
"""

from typing import Any

import torch

from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.fp8_inc.adjustment import Adjustment, resolve_adjustment
from vllm.fp8_inc.layers.linear import Fp8LinearScheme
from vllm.fp8_inc.layers.moe import Fp8MoEMethod
from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.settings import Settings
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.utils.torch_utils import is_quantized_kv_cache


class ServedOnCpu:
    """Stands before upstream's class in the bases of a configuration.

    Attributes:
        config: ``quantization_config`` of the checkpoint.
    """

    config: dict[str, Any] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        loaded = super().from_config(config)
        loaded.config = config
        return loaded

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def recipe_of(self, layer: torch.nn.Module, prefix: str) -> Fp8Recipe | None:
        """How ``layer`` was quantised to FP8, or None where it is upstream's.

        Args:
            layer: A Linear layer, an LM head or routed experts.
            prefix: Its name.

        Raises:
            ValueError: Naming the layer and what cannot be served.
        """
        raise NotImplementedError

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        if isinstance(layer, (Attention, MLAAttention)) and not upstream_serves_cache():
            return None
        if isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            recipe = self.recipe_of(layer, prefix)
            if recipe and isinstance(layer, RoutedExperts):
                return Fp8MoEMethod(recipe, layer, prefix)
            if recipe:
                layer.scheme = Fp8LinearScheme(recipe, prefix)
                # Upstream's method of this name only calls the scheme.
                return CompressedTensorsLinearMethod(self)
        return super().get_quant_method(layer, prefix)

    def adjustment(self) -> Adjustment:
        """The adjustment rule of the checkpoint on the device served."""
        settings = Settings.of(get_current_vllm_config())
        return resolve_adjustment(self.config, settings.format)


def upstream_serves_cache() -> bool:
    """Whether the KV cache is quantised, and not as fp8_inc.

    Then upstream's KV method loads the scales; otherwise loading.py does.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return True
    dtype = config.cache_config.cache_dtype
    return is_quantized_kv_cache(dtype) and dtype != "fp8_inc"
