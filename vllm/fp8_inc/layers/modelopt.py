# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``quant_method: modelopt`` and ``modelopt_mixed`` on CPU.

The configuration may stand in config.json or, as before ModelOpt 0.31, in
hf_quant_config.json; vLLM reads both.
"""

from typing import Any

import torch

from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.layers.served import ServedOnCpu
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
)

# quant_algo -> what a weight scale covers, and whether there is an input_scale.
_RECIPES = {
    "FP8": ("tensor", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("channel", False),
    "FP8_PB_WO": ("block", False),
}


def _recipe(algorithm: str, adjustment: Adjustment) -> Fp8Recipe:
    weights, static = _RECIPES[algorithm]
    return Fp8Recipe(weights, static, adjustment)


class _Quantized:
    """Marks a layer that upstream takes for a quantised one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Fp8IncModelOptConfig(ServedOnCpu, ModelOptFp8Config):
    """Upstream's configuration, with FP8 layers that run on CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.LinearMethodCls = self.FusedMoEMethodCls = _Quantized

    def recipe_of(self, layer: torch.nn.Module, prefix: str) -> Fp8Recipe | None:
        method = ModelOptFp8Config.get_quant_method(self, layer, prefix)
        if not isinstance(method, _Quantized):
            return None
        return _recipe(self.quant_method, self.adjustment())


class Fp8IncModelOptMixedConfig(ServedOnCpu, ModelOptMixedPrecisionConfig):
    """Upstream's configuration, whose FP8 layers run on CPU and no others."""

    def recipe_of(self, layer: torch.nn.Module, prefix: str) -> Fp8Recipe | None:
        if self.is_layer_excluded(prefix):
            return None
        algorithm = self._resolve_quant_algo(prefix)
        if algorithm is None:
            return None
        if algorithm not in _RECIPES:
            raise ValueError(
                f"{prefix}: quantized_layers says {algorithm}, which no CPU kernel "
                f"serves; of modelopt_mixed these are served: {sorted(_RECIPES)}. "
                "Quantise the layer to FP8, or serve the model on another device"
            )
        return _recipe(algorithm, self.adjustment())
