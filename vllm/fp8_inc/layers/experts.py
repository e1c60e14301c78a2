# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The routed experts' arithmetic on CPU: FP8 products of layers/gemm.py.

An opaque operator, because which experts run depends on the data.
"""

import torch
import torch.nn.functional as F

from vllm.fp8_inc.layers.gemm import fp8_linear
from vllm.utils.torch_utils import direct_register_custom_op

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def fp8_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_dequant_scale: torch.Tensor,
    w13_input_quant_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_dequant_scale: torch.Tensor,
    w2_input_quant_scale: torch.Tensor | None,
    activation: str,
    weight_on_input: bool,
    device: str,
) -> torch.Tensor:
    """Computes the routed experts of gated MLPs.

    Args:
        x: [tokens, hidden] activations.
        topk_weights: [tokens, top_k] float32.
        topk_ids: [tokens, top_k] ids into the experts below; -1 for none of them.
        w13: [experts, 2 * intermediate, hidden] float8_e4m3fn, gate then up.
        w13_dequant_scale: [experts, 2 * intermediate] float32.
        w13_input_quant_scale: 0-d in the dtype of x, for all experts; None takes
            the scale of each token from its amax.
        w2: [experts, hidden, intermediate] float8_e4m3fn.
        w2_dequant_scale: [experts, hidden] float32.
        w2_input_quant_scale: [experts] in the dtype of x; None as above.
        activation: A key of ACTIVATIONS.
        weight_on_input: Whether topk_weights multiply x and not the result.
        device: "gaudi2" or "gaudi3", whose cast is used.

    Returns:
        [tokens, hidden] in the dtype of x.
    """
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(topk_ids == expert)
        weight = topk_weights[tokens, slots, None]
        hidden = x[tokens]
        if weight_on_input:
            hidden = (hidden * weight).to(x.dtype)
        gate, up = (
            fp8_linear(
                hidden,
                w13[expert],
                w13_dequant_scale[expert],
                w13_input_quant_scale,
                None,
                device,
            )
            .float()
            .chunk(2, dim=-1)
        )
        hidden = fp8_linear(
            (ACTIVATIONS[activation](gate) * up).to(x.dtype),
            w2[expert],
            w2_dequant_scale[expert],
            None if w2_input_quant_scale is None else w2_input_quant_scale[expert],
            None,
            device,
        ).float()
        out.index_add_(0, tokens, hidden if weight_on_input else hidden * weight)
    return out.to(x.dtype)


def _fake(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    return torch.empty_like(x)


direct_register_custom_op(op_name="fp8_experts", op_func=fp8_experts, fake_impl=_fake)
