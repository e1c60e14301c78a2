# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""torch.ops.hpu.*: the product's own (vllm.fp8_inc.hpu_ops), and what only the
worker calls: the experts and the softmax over blocks. Their schemas are inferred from
the worker's call sites; numbers of a real Gaudi were not available to compare with.
"""

from soft_gaudi import blocks, experts
from soft_gaudi.chip import chip
from vllm.fp8_inc import hpu_ops
from vllm.fp8_inc.hpu_ops.registration import define

_EXPERTS = (
    "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
    "Tensor[] w12, Tensor[] w3, "
)
_SWITCHES = "bool permuted_weights, str activation, int experts_min, int experts_max, "
_TAIL = _SWITCHES + "int chunk_size=0, int total_experts=0) -> Tensor"
_MEASURE_TAIL = (
    _SWITCHES + "bool measurement_mode=False, int chunk_size=0, int total_experts=0) "
    "-> (Tensor, Tensor)"
)
_DYNAMIC = (
    "*, Tensor d_scale_hidden_states, Tensor[] d_scale_w12, Tensor[] d_scale_w3, "
)
_STATIC = (
    "*, Tensor d_scale_hidden_states, Tensor[] d_scale_intermediate_hidden_states, "
    "Tensor[] d_scale_w12, Tensor[] d_scale_w3, "
)
_SCALARS = (
    "float d_scale_hidden_states, float[] d_scale_intermediate_hidden_states, "
    "float[] d_scale_w12, float[] d_scale_w3, "
)
_SOFTMAX = (
    "Tensor block_max, Tensor block_sums, Tensor block_groups, SymInt batch_size, "
    "SymInt[] out_shape) -> Tensor"
)
_MOE = "mixture_of_experts"
_OPERATORS = {
    f"{_MOE}.fused_weights": (_EXPERTS + _TAIL, experts.unquantised, experts.fake),
    f"{_MOE}.fp8_fused_weights_dynamic": (
        _EXPERTS + _DYNAMIC + _TAIL,
        experts.dynamic_fp8,
        experts.fake,
    ),
    f"{_MOE}.fp8_fused_weights": (
        _EXPERTS + _STATIC + _TAIL,
        experts.static_fp8,
        experts.fake,
    ),
    f"{_MOE}.fp8_fused_weights_scalars": (
        _EXPERTS + _SCALARS + _TAIL,
        experts.scalar_fp8,
        experts.fake,
    ),
    f"{_MOE}.fp8_measurement_fused_weights": (
        _EXPERTS + _MEASURE_TAIL,
        experts.measured,
        experts.fake_measured,
    ),
    "block_softmax_adjustment": (_SOFTMAX, blocks.adjustment, blocks.fake_adjustment),
}


def install() -> None:
    """Registers the operators, for the chip of this process."""
    hpu_ops.register()
    hpu_ops.set_device(chip())
    for name, (schema, implementation, fake) in _OPERATORS.items():
        define(name, schema, implementation, fake)
