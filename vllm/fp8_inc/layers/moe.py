# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8-static experts of compressed-tensors checkpoints."""

from types import MethodType

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.nn import Parameter

from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.layers.experts import ACTIVATIONS
from vllm.fp8_inc.layers.routing import select_experts
from vllm.fp8_inc.layers.weights import adjust_weight, static_input_scale
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)


class Fp8StaticMoEMethod(CompressedTensorsW8A8Fp8MoEMethod):
    """W8A8 FP8 experts: weights per tensor or per channel, static activations.

    Upstream's parameters and loaders, the device's arithmetic.
    """

    def __init__(
        self,
        weight_quant: QuantizationArgs,
        input_quant: QuantizationArgs,
        layer: torch.nn.Module,
        adjustment: Adjustment,
        layer_name: str,
    ) -> None:
        # Not the parent's: it selects a kernel, and CPU has none.
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.weight_quant = weight_quant
        self.input_quant = input_quant
        self.static_input_scales = True
        self.weight_block_size = None
        self.block_quant = False
        self.adjustment = adjustment
        self.layer_name = layer_name
        unsupported = {
            "activation": self.moe.activation.value not in ACTIVATIONS,
            "swiglu_limit": self.moe.swiglu_limit is not None,
            "has_bias": self.moe.has_bias,
        }
        for name, found in unsupported.items():
            if found:
                raise ValueError(
                    f"{layer_name}: FP8-static experts with {name} "
                    f"{getattr(self.moe, name)} are not supported on CPU"
                )

    @property
    def is_monolithic(self) -> bool:
        """Routing happens in apply_monolithic, through select_experts."""
        return True

    def get_fused_moe_quant_config(
        self, layer: torch.nn.Module
    ) -> FusedMoEQuantConfig | None:
        return None

    def create_weights(self, layer: torch.nn.Module, *args, **kwargs) -> None:
        super().create_weights(layer, *args, **kwargs)
        for name in ("w13", "w2"):
            # Upstream begins with ones, which would pass for scales.
            getattr(layer, f"{name}_weight_scale").data.fill_(torch.nan)
            getattr(layer, f"{name}_input_scale").data.fill_(torch.nan)
        # One for gate_proj and one for up_proj. Upstream's loader writes both into
        # one place: the last wins, and a reload counts more than there is.
        scales = layer.w13_input_scale.data[:, None].repeat(1, 2)
        layer.w13_input_scale = Parameter(scales, requires_grad=False)
        layer.w13_input_scale.weight_loader = MethodType(_load_w13_input_scale, layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for name in ("w13", "w2"):
            weight = getattr(layer, f"{name}_weight").data
            scale = getattr(layer, f"{name}_weight_scale").data
            scale = _per_channel(scale, *weight.shape[:2])
            weight, scale = adjust_weight(
                weight, scale, self.adjustment, f"{self.layer_name}.{name}"
            )
            setattr(layer, f"{name}_weight", Parameter(weight, requires_grad=False))
            setattr(
                layer, f"{name}_weight_scale", Parameter(scale, requires_grad=False)
            )
        # All experts share one quantisation of the hidden states; each has its
        # own for what enters its down projection.
        hidden = self._input_scale(layer.w13_input_scale.data, "w13")
        down = [self._input_scale(scale, "w2") for scale in layer.w2_input_scale.data]
        layer.w13_input_quant_scale = Parameter(hidden, requires_grad=False)
        layer.w2_input_quant_scale = Parameter(torch.stack(down), requires_grad=False)
        del layer.w13_input_scale, layer.w2_input_scale

    def _input_scale(self, dequant_scales: torch.Tensor, name: str) -> torch.Tensor:
        return static_input_scale(
            dequant_scales,
            self.adjustment,
            self.moe.in_dtype,
            f"{self.layer_name}.{name}",
        ).quant_scale

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights, ids = select_experts(
            cpu_moe.select_experts,
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        if layer.expert_map is not None:
            ids = layer.expert_map[ids.long()]
        return torch.ops.vllm.fp8_static_experts(
            x,
            weights,
            ids,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_input_quant_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_input_quant_scale,
            layer.activation.value,
            layer.apply_router_weight_on_input,
            self.adjustment.served_on.name,
        )


def _load_w13_input_scale(
    layer: torch.nn.Module,
    param: Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Loads one scale of [experts, 2]; called as RoutedExperts.weight_loader is."""
    local = layer._map_global_expert_id_to_local_expert_id(expert_id)
    if local >= 0:
        param.data[local, ("w1", "w3").index(shard_id)] = loaded_weight.reshape(())
    return local >= 0 if return_success else None


def _per_channel(scale: torch.Tensor, experts: int, channels: int) -> torch.Tensor:
    """Expands [E], [E, 2] (gate, up) or [E, N, 1] scales to [E, N]."""
    scale = scale.reshape(experts, -1)
    return scale.repeat_interleave(channels // scale.shape[1], dim=1)
