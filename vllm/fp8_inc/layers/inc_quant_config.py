# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""bf16 checkpoints whose weights QUANT_CONFIG turns into FP8 while they load."""

import functools
from typing import Any

import torch
from torch.nn import Parameter

from vllm.config import get_current_vllm_config
from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.layers.inc_weights import (
    EXPERTS_TYPE,
    LINEAR_TYPES,
    quantise_experts,
    quantise_linear,
)
from vllm.fp8_inc.layers.moe import Fp8MoEMethod
from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.quant_config import read_for
from vllm.fp8_inc.settings import Settings
from vllm.fp8_inc.sources.inc.scales import IncScales
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import set_weight_attrs


class IncQuantConfig(QuantizationConfig):
    """Chooses by the lists of the JSON which layers become FP8.

    Args:
        path: The JSON, for messages.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @classmethod
    def get_name(cls) -> str:
        return "inc"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "IncQuantConfig":
        raise ValueError("QUANT_CONFIG names the configuration, not the checkpoint")

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        vllm_config = get_current_vllm_config()
        inc, kind = read_for(vllm_config), type(layer).__name__
        fmt = Settings.of(vllm_config).format
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            path = inc.path_of(prefix, inc.linears)
            if kind in LINEAR_TYPES and _chosen(inc, path, kind, path in inc.linears):
                return IncLinearMethod(inc, path, fmt)
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        if isinstance(layer, RoutedExperts):
            path = inc.path_of(f"{prefix}.moe_op", inc.experts)
            if _chosen(inc, path, EXPERTS_TYPE, path in inc.experts):
                return IncMoEMethod(inc, path, fmt, layer)
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return None


def _chosen(inc: IncScales, path: str, kind: str, measured: bool) -> bool:
    """Whether a layer becomes FP8; one that should and cannot fails while it loads."""
    known = measured or inc.fixed is not None
    return inc.quantises(path, kind) and (
        known or not inc.config.ignore_modules_wo_measures
    )


class IncLinearMethod(UnquantizedLinearMethod):
    """Loads a weight in bf16, then makes it FP8 with the scales of the files."""

    def __init__(self, inc: IncScales, path: str, fmt: Fp8Format) -> None:
        super().__init__()
        self.inc, self.path, self.format = inc, path, fmt

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        plain, kind = layer.weight.data, type(layer).__name__
        found = quantise_linear(self.inc, self.path, kind, plain, self.format)
        layer.weight = Parameter(found.weight, requires_grad=False)
        layer.weight_scale = Parameter(found.weight_scale, requires_grad=False)
        layer.input_quant_scale = Parameter(
            found.input_quant_scale, requires_grad=False
        )
        if self.path.endswith(".kv_b_proj"):
            # INC patches the layer after the worker has absorbed the bf16 weight.
            layer.dequantized_weight = functools.partial(_take_plain, layer, plain)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.ops.vllm.fp8_linear(
            x,
            layer.weight,
            layer.weight_scale,
            layer.input_quant_scale,
            bias,
            self.format.name,
        )


def _take_plain(
    layer: torch.nn.Module, plain: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Gives the bf16 weight to MLA, once; nothing else needs it."""
    del layer.dequantized_weight
    return plain.to(out_dtype)


class IncMoEMethod(Fp8MoEMethod):
    """Loads experts in bf16, then makes them FP8 with the scales of the files."""

    def __init__(
        self, inc: IncScales, path: str, fmt: Fp8Format, layer: torch.nn.Module
    ) -> None:
        adjustment = Adjustment(fmt, fmt, "by QUANT_CONFIG")
        super().__init__(Fp8Recipe("channel", True, adjustment), layer, path)
        self.inc, self.path, self.format = inc, path, fmt

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        width = intermediate_size_per_partition
        for name, shape in (
            ("w13_weight", (num_experts, 2 * width, hidden_size)),
            ("w2_weight", (num_experts, hidden_size, width)),
        ):
            weight = Parameter(torch.empty(shape, dtype=params_dtype), False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, attributes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        experts = range(layer.w13_weight.shape[0])
        if layer.expert_map is not None:  # index in the model -> here, or -1
            here = layer.expert_map.tolist()
            experts = sorted(
                (e for e in range(len(here)) if here[e] >= 0), key=here.__getitem__
            )
        found = quantise_experts(
            self.inc,
            self.path,
            layer.w13_weight.data,
            layer.w2_weight.data,
            list(experts),
            self.format,
        )
        for name, tensor in vars(found).items():
            setattr(layer, name, Parameter(tensor, requires_grad=False))
