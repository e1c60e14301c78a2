# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Quantises the bf16 weights that QUANT_CONFIG chooses, with INC's scales.

The results have the names and shapes that ``linear.Fp8LinearScheme`` and
``moe.Fp8MoEMethod`` keep on a loaded layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import StaticScale
from vllm.fp8_inc.sources.inc.linears import WeightScale
from vllm.fp8_inc.sources.inc.methods import fixed_scale, weight_dequant_scales
from vllm.fp8_inc.sources.inc.read import IncScales

# The Linear classes of vLLM that INC quantises; others stay as they are, as with it.
LINEAR_TYPES = frozenset(
    "Linear ParallelLMHead RowParallelLinear ColumnParallelLinear "
    "MergedColumnParallelLinear QKVParallelLinear ReplicatedLinear".split()
)
_MOE_TYPE, _EXPERT_TYPE = "VllmMixtureOfExpertsOp", "MoeMatmul"


@dataclass(frozen=True)
class Fp8Linear:
    """A Linear layer in FP8.

    Attributes:
        weight: float8_e4m3fn codes [N, K].
        weight_scale: Dequant scales, float32 [N].
        input_quant_scale: 0-d, activation dtype; q = cast(x * input_quant_scale).
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_quant_scale: torch.Tensor


@dataclass(frozen=True)
class Fp8Experts:
    """The experts of a layer in FP8, E of them on this rank.

    Attributes:
        w13_weight: float8_e4m3fn codes [E, 2 I, H].
        w13_weight_scale: Dequant scales, float32 [E, 2 I].
        w13_input_quant_scale: 0-d, activation dtype.
        w2_weight: float8_e4m3fn codes [E, H, I].
        w2_weight_scale: Dequant scales, float32 [E, H].
        w2_input_quant_scale: [E], activation dtype.
    """

    w13_weight: torch.Tensor
    w13_weight_scale: torch.Tensor
    w13_input_quant_scale: torch.Tensor
    w2_weight: torch.Tensor
    w2_weight_scale: torch.Tensor
    w2_input_quant_scale: torch.Tensor


def quantise_linear(
    inc: IncScales, path: str, module_type: str, weight: torch.Tensor, fmt: Fp8Format
) -> Fp8Linear | None:
    """Quantises a Linear layer, or returns None where it stays as it is.

    Args:
        inc: The scales of this rank.
        path: Of the layer in the model.
        module_type: Its class name.
        weight: [N, K] of this rank, in the dtype of the activations.
        fmt: Format of the device that serves.

    Raises:
        ValueError: If the configuration quantises the layer and the files lack it,
            or hold scales that cannot be those of this weight.
    """
    if module_type not in LINEAR_TYPES or not inc.quantises(path, module_type):
        return None
    _refuse_dynamic(inc)
    rule = inc.config.scheme_of(path, module_type)
    if inc.fixed is not None:
        inputs, of_weight = fixed_scale(rule.activation, inc.device), None
    elif found := inc.linears.get(path):
        inputs, of_weight = found.input_dequant_scale, found.weight_dequant_scale
    else:
        return _unmeasured(inc, path)
    codes, scale = _quantise(inc, path, module_type, weight, of_weight, fmt)
    return Fp8Linear(
        codes, scale, StaticScale.from_dequant(inputs, weight.dtype).quant_scale
    )


def quantise_experts(
    inc: IncScales,
    path: str,
    w13: torch.Tensor,
    w2: torch.Tensor,
    experts: Sequence[int],
    fmt: Fp8Format,
) -> Fp8Experts | None:
    """Quantises the experts of a layer, or returns None where they stay as they are.

    An expert that no token visited in the calibration takes the largest scale of the
    layer for what enters its w2; reading the files has named it.

    Args:
        inc: The scales of this rank.
        path: Of the layer's ``moe_op``, as in the files.
        w13: [E, 2 I, H] of this rank, in the dtype of the activations.
        w2: [E, H, I].
        experts: Index in the whole model of each of the E.
        fmt: Format of the device that serves.

    Raises:
        ValueError: As ``quantise_linear``, or for an expert without scales.
    """
    if not inc.quantises(path, _MOE_TYPE):
        return None
    _refuse_dynamic(inc)
    if inc.fixed is not None:
        fixed = fixed_scale(
            inc.config.scheme_of(path, _MOE_TYPE).activation, inc.device
        )
        hidden, inner = fixed, [fixed] * len(experts)
        parts: tuple[Mapping[int, WeightScale], ...] = ({}, {})
    elif found := inc.experts.get(path):
        hidden = found.input_dequant_scale
        largest = max(found.intermediate.values(), default=0.0)
        inner = [found.intermediate.get(index) or largest for index in experts]
        parts = found.w13, found.w2
        _check_experts(inc, path, experts, parts, hidden and largest)
    else:
        return _unmeasured(inc, path)
    weights = []
    for name, weight, part in zip(("w13_list", "w2_list"), (w13, w2), parts):
        pairs = [
            _quantise(inc, f"{path}.{name}.{index}", _EXPERT_TYPE, one, scale, fmt)
            for index, one in zip(experts, weight, strict=True)
            for scale in [part.get(index)]
        ]
        weights.append([torch.stack(tensors) for tensors in zip(*pairs)])
    down = [StaticScale.from_dequant(s, w2.dtype).quant_scale for s in inner]
    return Fp8Experts(
        *weights[0],
        StaticScale.from_dequant(hidden, w13.dtype).quant_scale,
        *weights[1],
        torch.stack(down),
    )


def _check_experts(
    inc: IncScales,
    path: str,
    experts: Sequence[int],
    parts: Sequence[Mapping[int, WeightScale]],
    visited: float,
) -> None:
    missing = [i for i in experts if any(i not in part for part in parts)]
    if missing or not visited:
        what = f"experts {missing}" if missing else "its input"
        raise ValueError(
            f"{', '.join(inc.files)}: {path} has no scales for {what}. Calibrate "
            "again, with the parallelism that num_experts tells, or add it to "
            "blocklist.names"
        )


def _quantise(
    inc: IncScales,
    path: str,
    module_type: str,
    weight: torch.Tensor,
    known: WeightScale,
    fmt: Fp8Format,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and dequant scales [N] of one weight."""
    if known is None:
        rule = inc.config.scheme_of(path, module_type).weight
        try:
            dtype = inc.config.dtype
            scales = weight_dequant_scales(weight, rule, inc.device, dtype)
        except ValueError as error:
            raise ValueError(f"{inc.path}: {path}: {error}") from None
    else:
        scales = torch.tensor(known, dtype=torch.float32, device="cpu")
    if scales.numel() not in (1, len(weight)):
        raise ValueError(
            f"{', '.join(inc.files)}: {path} has {scales.numel()} weight scales, but "
            f"{len(weight)} output channels; the files are of another model"
        )
    quant_scale = scales.float().reciprocal().to(weight.dtype).reshape(-1, 1)
    largest = (weight * quant_scale).abs().max().item()
    if known is not None and largest > fmt.max:
        raise ValueError(
            f"{', '.join(inc.files)}: {path}.weight reaches {largest:g} after its "
            f"scale, but {fmt.name} ends at {fmt.max:g}; the files are of another "
            "model, or of another device"
        )
    codes = fmt.cast(weight, quant_scale).view(torch.float8_e4m3fn)
    acting = quant_scale.float().reciprocal().flatten()
    return codes, acting.expand(len(weight)).contiguous()


def _refuse_dynamic(inc: IncScales) -> None:
    if inc.config.dynamic_quantization:
        raise ValueError(
            f'{inc.path}: "dynamic_quantization" of Linear layers and experts is not '
            "supported; take a calibrated scale_method, or a checkpoint with dynamic "
            "FP8 activations"
        )


def _unmeasured(inc: IncScales, path: str) -> None:
    if inc.config.ignore_modules_wo_measures:
        return
    raise ValueError(
        f"{', '.join(inc.files)}: {path} is to be quantised and was not measured. "
        "Calibrate with the lists with which you serve, add it to blocklist.names, or "
        'set "ignore_modules_wo_measures": true'
    )
