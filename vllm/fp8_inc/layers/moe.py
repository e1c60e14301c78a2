# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8 W8A8 experts."""

from types import MethodType
from typing import Any

import torch
from torch.nn import Parameter

from vllm.fp8_inc.layers.blocks import blocks, requantize_per_channel, scale_rows
from vllm.fp8_inc.layers.experts import ACTIVATIONS
from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.layers.routing import select_experts
from vllm.fp8_inc.layers.weights import check_scales, fit_weight, static_input_scale
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.utils import set_weight_attrs


class Fp8MoEMethod(FusedMoEMethodBase):
    """W8A8 FP8 experts: any weight scales, activations static or per token.

    Upstream's loaders, the device's arithmetic. A loaded layer keeps one weight
    scale an output channel of each expert.
    """

    def __init__(
        self, recipe: Fp8Recipe, layer: torch.nn.Module, layer_name: str
    ) -> None:
        super().__init__(layer.moe_config)
        self.recipe = recipe
        self.layer_name = layer_name
        unsupported = {
            "activation": self.moe.activation.value not in ACTIVATIONS,
            "swiglu_limit": self.moe.swiglu_limit is not None,
            "has_bias": self.moe.has_bias,
        }
        for name, found in unsupported.items():
            if found:
                raise ValueError(
                    f"{layer_name}: FP8 experts with {name} "
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

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        width, hidden = intermediate_size_per_partition, hidden_size
        if self.recipe.weights == "block":
            self._check_split(width)
        attributes |= {"quant_method": self.recipe.weights}

        loader = self.recipe.scale_loader(attributes["weight_loader"])
        of_scales = attributes | {"weight_loader": loader}

        def add(name: str, data: torch.Tensor, attributes: dict[str, Any]) -> None:
            layer.register_parameter(name, Parameter(data, requires_grad=False))
            set_weight_attrs(getattr(layer, name), attributes)

        # NaN until a scale is loaded: ones would pass for scales.
        for name, widths, inputs in (
            ("w13", [width, width], hidden),
            ("w2", [hidden], width),
        ):
            shape = (num_experts, sum(widths), inputs)
            weight = torch.empty(shape, dtype=torch.float8_e4m3fn)
            add(f"{name}_weight", weight, attributes)
            scales = torch.full((num_experts, *self._shape(widths, inputs)), torch.nan)
            add(f"{name}_{self.recipe.scale_name}", scales, of_scales)
        if not self.recipe.static_inputs:
            return
        # One for gate_proj and one for up_proj. Upstream's loader writes both into
        # one place: the last wins, and a reload counts more than there is.
        load = MethodType(_load_w13_input_scale, layer)
        scales = torch.full((num_experts, 2), torch.nan)
        add("w13_input_scale", scales, attributes | {"weight_loader": load})
        add("w2_input_scale", torch.full((num_experts,), torch.nan), attributes)

    def _check_split(self, width: int) -> None:
        ranks = self.moe.moe_parallel_config.tp_size
        if ranks > 1 and any(width % size for size in self.recipe.block):
            raise ValueError(
                f"{self.layer_name}: tensor parallelism over {ranks} ranks cuts "
                f"weight_block_size {list(self.recipe.block)}: a rank has "
                f"{width} channels of an expert. Use fewer ranks, or "
                "--enable-expert-parallel"
            )

    def _shape(self, widths: list[int], inputs: int) -> tuple[int, ...]:
        """Shape of one expert's weight scales, as upstream's loaders fill them."""
        if self.recipe.weights == "tensor":
            return (len(widths),) if len(widths) > 1 else ()
        if self.recipe.weights == "channel":
            return sum(widths), 1
        rows, columns = self.recipe.block
        return sum(blocks(width, rows) for width in widths), blocks(inputs, columns)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for name, parts in (("w13", 2), ("w2", 1)):
            key, part = f"{name}_{self.recipe.scale_name}", f"{self.layer_name}.{name}"
            weight, scale = getattr(layer, f"{name}_weight").data, getattr(layer, key)
            check_scales(scale.data, f"{part}.{self.recipe.scale_name}")
            scale = scale.data * fit_weight(weight, self.recipe.adjustment, part)
            scale = self._per_channel(weight, scale, parts)
            delattr(layer, key)
            setattr(layer, f"{name}_weight", Parameter(weight, requires_grad=False))
            setattr(
                layer, f"{name}_weight_scale", Parameter(scale, requires_grad=False)
            )
        if not self.recipe.static_inputs:
            layer.w13_input_quant_scale = layer.w2_input_quant_scale = None
            return
        # All experts share one quantisation of the hidden states; each has its
        # own for what enters its down projection.
        hidden = self._input_scale(layer.w13_input_scale.data, "w13")
        down = [self._input_scale(scale, "w2") for scale in layer.w2_input_scale.data]
        layer.w13_input_quant_scale = Parameter(hidden, requires_grad=False)
        layer.w2_input_quant_scale = Parameter(torch.stack(down), requires_grad=False)
        del layer.w13_input_scale, layer.w2_input_scale

    def _per_channel(
        self, weight: torch.Tensor, scale: torch.Tensor, parts: int
    ) -> torch.Tensor:
        """Scales [E, N]; of block-wise weights the codes change too.

        Args:
            weight: [E, N, K] codes.
            scale: [E], [E, 2] (gate, up), [E, N, 1] or [E, block rows, columns].
            parts: How many projections of N / parts channels are fused.
        """
        experts, channels = weight.shape[:2]
        if self.recipe.weights != "block":
            scale = scale.reshape(experts, -1)
            return scale.repeat_interleave(channels // scale.shape[1], dim=1)
        rows, columns = self.recipe.block
        row_of = scale_rows([channels // parts] * parts, rows)
        served_on = self.recipe.adjustment.served_on
        pairs = zip(weight, scale, strict=True)
        return torch.stack(
            [requantize_per_channel(w, s, row_of, columns, served_on) for w, s in pairs]
        )

    def _input_scale(self, dequant_scales: torch.Tensor, name: str) -> torch.Tensor:
        return static_input_scale(
            dequant_scales,
            self.recipe.adjustment,
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
        return torch.ops.vllm.fp8_experts(
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
            self.recipe.adjustment.served_on.name,
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
