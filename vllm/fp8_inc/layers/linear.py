# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8 W8A8 Linear layers."""

import functools
from collections.abc import Callable

import torch
from torch.nn import Parameter

import vllm.fp8_inc.layers.gemm  # noqa: F401 (registers the operator)
from vllm.fp8_inc.layers.blocks import (
    blocks,
    check_fused,
    requantize_per_channel,
    scale_rows,
)
from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.layers.weights import check_scales, fit_weight, static_input_scale
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_input_scale,
    create_fp8_weight_parameter,
)
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    PerTensorScaleParameter,
)


class Fp8LinearScheme(CompressedTensorsScheme):
    """W8A8 FP8: any weight scales, activations static per tensor or per token.

    Whatever the checkpoint has, a loaded layer keeps one weight scale an output
    channel: fused projections keep their own, and blocks are requantised as on the
    device (layers/blocks.py).
    """

    def __init__(self, recipe: Fp8Recipe, layer_name: str) -> None:
        self.recipe = recipe
        self.layer_name = layer_name

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size: int,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable,
        **kwargs,
    ) -> None:
        widths, inputs = output_partition_sizes, input_size_per_partition
        layer.logical_widths = widths
        layer.orig_dtype = params_dtype
        layer.dequantized_weight = functools.partial(dequantized_weight, layer)
        layer.weight = create_fp8_weight_parameter(sum(widths), inputs, weight_loader)
        if self.recipe.weights == "block":
            # Upstream's loaders of fused projections read it, at a reload too.
            layer.weight_block_size = self.recipe.block
            is_split = input_size != inputs or output_size != sum(widths)
            check_fused(self.layer_name, widths, is_split, self.recipe.block, inputs)
        scale_loader = self.recipe.scale_loader(weight_loader)
        scale = self._empty_scale(widths, inputs, scale_loader)
        layer.register_parameter(self.recipe.scale_name, scale)
        if self.recipe.static_inputs:
            layer.input_scale = create_fp8_input_scale(widths, weight_loader)
            layer.input_scale.data.fill_(torch.nan)

    def _empty_scale(
        self, widths: list[int], inputs: int, weight_loader: Callable
    ) -> Parameter:
        """The scales to load, NaN until then."""
        if self.recipe.weights == "tensor":
            empty = torch.full((len(widths),), torch.nan)
            return PerTensorScaleParameter(data=empty, weight_loader=weight_loader)
        if self.recipe.weights == "channel":
            return ChannelQuantScaleParameter(
                data=torch.full((sum(widths), 1), torch.nan),
                output_dim=0,
                weight_loader=weight_loader,
            )
        block_rows, block_columns = self.recipe.block
        rows = sum(blocks(width, block_rows) for width in widths)
        return BlockQuantScaleParameter(
            data=torch.full((rows, blocks(inputs, block_columns)), torch.nan),
            input_dim=1,
            output_dim=0,
            weight_loader=weight_loader,
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        name = self.recipe.scale_name
        weight, scale = layer.weight.data, getattr(layer, name).data
        check_scales(scale, f"{self.layer_name}.{name}")
        scale = scale * fit_weight(weight, self.recipe.adjustment, self.layer_name)
        scale = self._per_channel(layer.logical_widths, weight, scale)
        delattr(layer, name)
        layer.weight = Parameter(weight, requires_grad=False)
        layer.weight_scale = Parameter(scale, requires_grad=False)
        layer.input_quant_scale = None
        if self.recipe.static_inputs:
            inputs = static_input_scale(
                layer.input_scale.data,
                self.recipe.adjustment,
                layer.orig_dtype,
                self.layer_name,
            )
            del layer.input_scale, layer.input_quant_scale
            layer.input_quant_scale = Parameter(inputs.quant_scale, requires_grad=False)

    def _per_channel(
        self, widths: list[int], weight: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """Scales [out]; of a block-wise weight the codes change too."""
        if self.recipe.weights == "tensor":
            return scale.repeat_interleave(torch.tensor(widths))
        if self.recipe.weights == "channel":
            return scale.flatten()
        rows, columns = self.recipe.block
        served_on = self.recipe.adjustment.served_on
        return requantize_per_channel(
            weight, scale, scale_rows(widths, rows), columns, served_on
        )

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.ops.vllm.fp8_linear(
            x,
            layer.weight,
            layer.weight_scale,
            layer.input_quant_scale,
            bias,
            self.recipe.adjustment.served_on.name,
        )


def dequantized_weight(layer: torch.nn.Module, out_dtype: torch.dtype) -> torch.Tensor:
    """Returns the [out, in] weight without its scales.

    MLA absorbs kv_b_proj from here (patches/vllm). Upstream multiplies with an
    identity matrix instead, whose ones a static activation scale does not hold.
    """
    return (layer.weight.float() * layer.weight_scale[:, None]).to(out_dtype)


class PlainLinearMethod(UnquantizedLinearMethod):
    """An unquantised Linear that keeps its weight for MLA to read.

    Upstream's packs the weight for its CPU kernel and frees it before MLA has
    absorbed kv_b_proj. Where torch has no fast bfloat16, the product is float32's.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inputs = (x, layer.weight, bias)
        if x.dtype == torch.bfloat16 and not _has_fast_bfloat16():
            inputs = tuple(i if i is None else i.float() for i in inputs)
        return torch.nn.functional.linear(*inputs).to(x.dtype)


def _has_fast_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU; else torch does, very slowly."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
