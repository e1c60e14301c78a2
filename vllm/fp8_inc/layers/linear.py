# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8-static Linear layers of compressed-tensors checkpoints."""

import functools
from collections.abc import Callable

import torch
from compressed_tensors.quantization import QuantizationStrategy
from torch.nn import Parameter

import vllm.fp8_inc.layers.gemm  # noqa: F401 (registers the operator)
from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.layers.weights import adjust_weight, static_input_scale
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_input_scale,
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
)
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    PerTensorScaleParameter,
)

_SCALE_PARAMETERS = {
    QuantizationStrategy.TENSOR: PerTensorScaleParameter,
    QuantizationStrategy.CHANNEL: ChannelQuantScaleParameter,
}


class Fp8StaticLinearScheme(CompressedTensorsScheme):
    """W8A8 FP8: weights per tensor or per channel, static activations per tensor."""

    def __init__(
        self, strategy: QuantizationStrategy, adjustment: Adjustment, layer_name: str
    ) -> None:
        self.scale_parameter = _SCALE_PARAMETERS[strategy]
        self.adjustment = adjustment
        self.layer_name = layer_name

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
        weight_loader: Callable,
        **kwargs,
    ) -> None:
        layer.logical_widths = output_partition_sizes
        layer.orig_dtype = params_dtype
        layer.dequantized_weight = functools.partial(dequantized_weight, layer)
        layer.weight = create_fp8_weight_parameter(
            sum(output_partition_sizes), input_size_per_partition, weight_loader
        )
        layer.weight_scale = create_fp8_scale_parameter(
            self.scale_parameter,
            output_partition_sizes,
            input_size_per_partition,
            None,
            weight_loader,
        )
        layer.input_scale = create_fp8_input_scale(
            output_partition_sizes, weight_loader
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        scale = layer.weight_scale.data.flatten()
        if self.scale_parameter is PerTensorScaleParameter:
            # Fused projections keep their own scales, one an output channel:
            # no second quantisation to a common one.
            widths = torch.tensor(layer.logical_widths)
            scale = scale.repeat_interleave(widths)
        weight, scale = adjust_weight(
            layer.weight.data, scale, self.adjustment, self.layer_name
        )
        inputs = static_input_scale(
            layer.input_scale.data, self.adjustment, layer.orig_dtype, self.layer_name
        )
        layer.weight = Parameter(weight, requires_grad=False)
        layer.weight_scale = Parameter(scale, requires_grad=False)
        layer.input_quant_scale = Parameter(inputs.quant_scale, requires_grad=False)
        del layer.input_scale

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.ops.vllm.fp8_static_linear(
            x,
            layer.weight,
            layer.weight_scale,
            layer.input_quant_scale,
            bias,
            self.adjustment.served_on.name,
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
    absorbed kv_b_proj.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)
