# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``quant_method: fp8`` on CPU: AutoFP8 and the official DeepSeek-V3/R1 checkpoints.

Layers that the checkpoint left unquantised, and models that vLLM quantises itself
while loading, stay upstream's.
"""

import torch

from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.layers.served import ServedOnCpu
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class Fp8IncFp8Config(ServedOnCpu, Fp8Config):
    """Upstream's configuration, with FP8 layers that run on CPU."""

    def recipe_of(self, layer: torch.nn.Module, prefix: str) -> Fp8Recipe | None:
        if isinstance(layer, ParallelLMHead) or not self._is_ours(prefix):
            return None
        if self.weight_block_size is None:
            static = self.activation_scheme == "static"
            return Fp8Recipe("tensor", static, self.adjustment())
        return Fp8Recipe(
            "block",
            static_inputs=False,
            adjustment=self.adjustment(),
            block=tuple(self.weight_block_size),
            scale_name="weight_scale_inv",
        )

    def _is_ours(self, prefix: str) -> bool:
        return (
            self.is_checkpoint_fp8_serialized
            and self.store_dtype is None
            and not is_layer_skipped(
                prefix=prefix,
                ignored_layers=self.ignored_layers,
                fused_mapping=self.packed_modules_mapping,
                match_mode=self.ignored_layers_match_mode,
            )
        )
