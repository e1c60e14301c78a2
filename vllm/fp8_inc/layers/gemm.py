# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The FP8 matrix product of the device, in float32 on CPU.

``y = (cast(x * quant_scale) @ w.T) * input_dequant_scale * weight_dequant_scale``,
as hpu.fp8_gemm_v2 computes it: exact products of FP8 values, float32
accumulation, scales after it, one rounding to the activation dtype. Float32 and
not bfloat16 matrices, because a bfloat16 product would be rounded a second time
before the scales, and because float32 gives the same numbers on every CPU.

An opaque operator: inductor would fuse the cast and drop the rounding of its
bfloat16 product.
"""

import torch

from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.layers.activations import quantize
from vllm.utils.torch_utils import direct_register_custom_op


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_dequant_scale: torch.Tensor,
    input_quant_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    device: str,
) -> torch.Tensor:
    """Multiplies activations with FP8 weights.

    Args:
        x: [..., K] activations, bfloat16, float16 or float32.
        weight: [N, K] float8_e4m3fn codes.
        weight_dequant_scale: float32, 0-d, [1] or [N].
        input_quant_scale: 0-d in the dtype of x; q = cast(x * input_quant_scale).
            None quantises each token by its own amax (layers/activations.py).
        bias: [N], added after the scales; or None.
        device: "gaudi2" or "gaudi3", whose cast is used.

    Returns:
        [..., N] in the dtype of x.
    """
    fmt = FORMATS[device]
    codes, input_dequant_scale = quantize(x, input_quant_scale, fmt)
    # A look-up in the table: weight.float() is slower (element by element in torch).
    values = fmt.decode(weight.view(torch.uint8))
    product = torch.nn.functional.linear(fmt.decode(codes), values)
    product *= input_dequant_scale
    product *= weight_dequant_scale
    if bias is not None:
        product += bias
    return product.to(x.dtype)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_dequant_scale: torch.Tensor,
    input_quant_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    device: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


direct_register_custom_op(op_name="fp8_linear", op_func=fp8_linear, fake_impl=_fake)
