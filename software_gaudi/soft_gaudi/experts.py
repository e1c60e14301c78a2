# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""hpu.mixture_of_experts and its FP8 overloads.

Common arguments: hidden_states [tokens, hidden]; expert_routing_table int
[tokens, top_k] with global expert ids; router_weights [tokens, top_k]; w12, a list of
[2 * intermediate, hidden] (gate, then up) and w3, a list of [hidden, intermediate], one
an expert from experts_min on, each transposed where permuted_weights is False. Every
d_scale is a dequant scale: of hidden_states 0-d, [1] or [tokens, 1], of weights [1] or
one a row. ``rest``: experts_max, and what only affects speed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soft_gaudi.chip import chip
from vllm.fp8_inc.formats import FORMATS

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
# What the worker's own dynamic quantisation adds, so that a row of zeros has a scale.
_AMAX_FLOOR = 1e-8


def unquantised(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    *rest: int,
) -> Tensor:
    """All operands in one floating dtype, which the result has too."""
    return _experts(
        hidden_states.float(),
        hidden_states.dtype,
        expert_routing_table,
        router_weights,
        [
            _Unquantised(gate_up, down, permuted_weights, activation)
            for gate_up, down in zip(w12, w3)
        ],
        experts_min,
    )


def static_fp8(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    *,
    d_scale_hidden_states: Tensor,
    d_scale_intermediate_hidden_states: list[Tensor] | list[None],
    d_scale_w12: list[Tensor],
    d_scale_w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    **rest: int,
) -> Tensor:
    """FP8 operands and a scale for each expert's intermediate activations."""
    return _experts(
        _decode(hidden_states) * d_scale_hidden_states.to(hidden_states.device).float(),
        torch.bfloat16,
        expert_routing_table,
        router_weights,
        [
            _Fp8(gate_up, down, permuted_weights, activation, *scales)
            for gate_up, down, *scales in zip(
                w12, w3, d_scale_w12, d_scale_intermediate_hidden_states, d_scale_w3
            )
        ],
        experts_min,
    )


def dynamic_fp8(*operands: Any, **options: Any) -> Tensor:
    """As static_fp8, but each token's intermediate gets a scale from its amax."""
    none = [None] * len(operands[-1])
    return static_fp8(*operands, d_scale_intermediate_hidden_states=none, **options)


def scalar_fp8(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    d_scale_hidden_states: float,
    d_scale_intermediate_hidden_states: list[float],
    d_scale_w12: list[float],
    d_scale_w3: list[float],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    *rest: int,
) -> Tensor:
    """As static_fp8, with scales as Python numbers."""

    def tensors(scales: list[float]) -> list[Tensor]:
        return list(torch.tensor(scales, device=hidden_states.device))

    return static_fp8(
        hidden_states,
        expert_routing_table,
        router_weights,
        w12,
        w3,
        d_scale_hidden_states=torch.tensor(d_scale_hidden_states),
        d_scale_intermediate_hidden_states=tensors(d_scale_intermediate_hidden_states),
        d_scale_w12=tensors(d_scale_w12),
        d_scale_w3=tensors(d_scale_w3),
        permuted_weights=permuted_weights,
        activation=activation,
        experts_min=experts_min,
    )


def measured(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    *rest: int,
) -> tuple[Tensor, Tensor]:
    """As unquantised, with each expert's largest intermediate activation, float32."""
    amax = hidden_states.new_zeros(len(w12), dtype=torch.float32)
    for index, gate_up in enumerate(w12):
        tokens, _ = torch.where(expert_routing_table == experts_min + index)
        if tokens.numel():
            expert = _Unquantised(gate_up, gate_up, permuted_weights, activation)
            values = expert.intermediate(hidden_states[tokens].float(), torch.float32)
            amax[index] = values.abs().amax()
    operands = (hidden_states, expert_routing_table, router_weights, w12, w3)
    return unquantised(*operands, permuted_weights, activation, experts_min), amax


def fake(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Shape and dtype of the result: bfloat16 for FP8 operands."""
    fp8 = hidden_states.dtype == torch.float8_e4m3fn
    return torch.empty_like(
        hidden_states, dtype=torch.bfloat16 if fp8 else hidden_states.dtype
    )


def fake_measured(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results of ``measured``."""
    amax = hidden_states.new_empty(len(w12), dtype=torch.float32)
    return torch.empty_like(hidden_states), amax


class _Unquantised:
    """One expert's gated MLP, in float32."""

    def __init__(
        self, gate_up: Tensor, down: Tensor, permuted: bool, activation: str
    ) -> None:
        self.gate_up = self._values(gate_up if permuted else gate_up.t())
        self.down = self._values(down if permuted else down.t())
        self.activation = _ACTIVATIONS[activation]

    def _values(self, weight: Tensor) -> Tensor:
        return weight.float()

    def intermediate(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, intermediate], rounded to ``dtype`` as the device's products."""
        gate, up = self._gate_up(x).to(dtype).float().chunk(2, -1)
        return (self.activation(gate) * up).to(dtype)

    def _gate_up(self, x: Tensor) -> Tensor:
        return x @ self.gate_up.t()

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.intermediate(x, dtype).float() @ self.down.t()


class _Fp8(_Unquantised):
    """One expert with FP8 weights and activations."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        permuted: bool,
        activation: str,
        gate_up_scale: Tensor,
        intermediate_scale: Tensor | None,
        down_scale: Tensor,
    ) -> None:
        super().__init__(gate_up, down, permuted, activation)
        # INC leaves scales on the host, as the bridge takes them.
        self.gate_up_scale = gate_up_scale.to(gate_up.device).float().view(1, -1)
        self.down_scale = down_scale.to(gate_up.device).float().view(1, -1)
        self.intermediate_scale = intermediate_scale
        if intermediate_scale is not None:
            self.intermediate_scale = intermediate_scale.to(gate_up.device)

    def _values(self, weight: Tensor) -> Tensor:
        return _decode(weight)

    def _gate_up(self, x: Tensor) -> Tensor:
        return super()._gate_up(x) * self.gate_up_scale

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        values = self.intermediate(x, dtype)
        fmt = FORMATS[chip()]
        scale = self.intermediate_scale
        if scale is None:
            scale = (
                values.abs().amax(-1, keepdim=True).float() + _AMAX_FLOOR
            ) / fmt.max
        codes = fmt.cast(values, scale.float().reciprocal())
        return (fmt.decode(codes) * scale.float()) @ self.down.t() * self.down_scale


def _experts(
    x: Tensor,
    dtype: torch.dtype,
    routing: Tensor,
    weights: Tensor,
    experts: list[_Unquantised],
    first: int,
) -> Tensor:
    """The weighted sum over each token's experts, in ``dtype``."""
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for index, expert in enumerate(experts):
        tokens, slots = torch.where(routing == first + index)
        if tokens.numel():
            result = expert(x[tokens], dtype) * weights[tokens, slots, None].float()
            out.index_add_(0, tokens, result)
    return out.to(dtype)


def _decode(codes: Tensor) -> Tensor:
    return FORMATS[chip()].decode(codes.view(torch.uint8))
