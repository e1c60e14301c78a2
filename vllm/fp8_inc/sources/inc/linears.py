# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The scales of Linear layers and of experts."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.fp8_inc.sources.inc.node_scales import NodeScales
from vllm.fp8_inc.sources.inc.nodes import (
    is_moe,
    match_attention,
    match_expert,
    type_of,
)
from vllm.fp8_inc.sources.inc.ranks import unify
from vllm.fp8_inc.sources.inc.schema import QuantConfig
from vllm.logger import init_logger

logger = init_logger(__name__)


# One for the whole weight, one per output channel of this rank, or None where it
# follows from the weight itself (``methods.weight_dequant_scales``).
WeightScale = float | tuple[float, ...] | None


@dataclass(frozen=True)
class LinearScales:
    """The dequant scales of a Linear layer.

    Attributes:
        input_dequant_scale: x = q * s.
        weight_dequant_scale: w = q * s.
    """

    input_dequant_scale: float
    weight_dequant_scale: WeightScale


@dataclass
class ExpertScales:
    """The dequant scales of the experts of one layer, by index in the whole model.

    Attributes:
        input_dequant_scale: Of the layer's input.
        intermediate: Of each expert's activation, the input of w2. 0: no token
            visited the expert.
        w13: Of each expert's gate and up weight.
        w2: Of each expert's down weight.
    """

    input_dequant_scale: float
    intermediate: dict[int, float] = field(default_factory=dict)
    w13: dict[int, WeightScale] = field(default_factory=dict)
    w2: dict[int, WeightScale] = field(default_factory=dict)


def linear_scales(
    config: QuantConfig, nodes: Mapping[str, NodeScales], where: str
) -> dict[str, LinearScales]:
    """The Linear layers that ``config`` quantises, by path.

    A path whose class is not known (``nodes.type_of``) is left out by name only.
    """
    found = {}
    unvisited = []
    for path, scales in nodes.items():
        if not _is_linear(path) or not config.quantises(path, type_of(path)):
            continue
        if 0 in scales.inputs:
            unvisited.append(path)
        else:
            found[path] = LinearScales(scales.inputs[0], _weight_scale(scales))
    if unvisited:
        logger.warning_once(
            "fp8_inc: %s: %d linear layers were never visited and have no scales (%s)",
            where,
            len(unvisited),
            unvisited[0],
        )
    return found


def _is_linear(path: str) -> bool:
    kind = type_of(path)
    return not (
        match_attention(path)
        or match_expert(path)
        or is_moe(path)
        or kind in ("B2BMatmul", "Softmax")
    )


def _weight_scale(scales: NodeScales) -> WeightScale:
    weight = scales.weight
    return weight[0] if weight and len(weight) == 1 else weight


def expert_scales(
    config: QuantConfig,
    per_rank: Mapping[int, Mapping[str, NodeScales]],
    made_on: int,
    num_experts: int | None,
    where: str,
) -> dict[str, ExpertScales]:
    """The experts that ``config`` quantises, by path of their ``moe_op``.

    A file counts experts from 0 on its rank. With expert parallelism rank r holds the
    r-th part of them; otherwise every rank has a slice of each, and the largest counts.

    Args:
        config: Its lists say which modules are quantised.
        per_rank: Rank -> path -> scales.
        made_on: World size at calibration.
        num_experts: Routed experts of the model, which tells the two apart.
        where: The files, for messages.

    Raises:
        ValueError: Where the number of experts is neither.
    """
    shifted: dict[int, dict[str, NodeScales]] = {}
    for rank, nodes in per_rank.items():
        moe = {p: s for p, s in nodes.items() if is_moe(p) or match_expert(p)}
        shifted[rank] = {
            path: scales for path, scales in moe.items() if _quantised(config, path)
        }
    if not any(shifted.values()):
        return {}
    local = _count(shifted)
    if made_on > 1 and num_experts is None:
        logger.warning_once(
            "fp8_inc: %s: the scales of experts are left out: without the model's "
            "number of experts it cannot be told which of %d ranks holds which",
            where,
            made_on,
        )
        return {}
    if num_experts is None or local == num_experts:
        experts = _sorted(unify(shifted), 0)
    elif local * made_on == num_experts:
        experts = _joined(shifted, local)
    else:
        raise ValueError(
            f"{where}: {local} experts on each of {made_on} ranks, but the model has "
            f"{num_experts}; these files are of another model, or some are missing"
        )
    _warn_unvisited(experts, where)
    return experts


def _quantised(config: QuantConfig, path: str) -> bool:
    return config.quantises(path, type_of(path))


def _count(per_rank: Mapping[int, Mapping[str, NodeScales]]) -> int:
    """Experts on a rank, by ``moe_op`` (one input more) or by their weights."""
    return max(
        len(scales.inputs) - 1 if is_moe(path) else match_expert(path).index + 1  # type: ignore[union-attr]
        for nodes in per_rank.values()
        for path, scales in nodes.items()
    )


def _sorted(nodes: Mapping[str, NodeScales], first: int) -> dict[str, ExpertScales]:
    layers: dict[str, ExpertScales] = defaultdict(lambda: ExpertScales(0.0))
    for path, scales in nodes.items():
        expert = match_expert(path)
        if expert is None:
            layer = layers[path]
            layer.input_dequant_scale = scales.inputs[0]
            layer.intermediate = {
                first + i: scale for i, scale in enumerate(scales.inputs[1:])
            }
        elif expert.weights == "w13_list":
            layers[expert.moe].w13[first + expert.index] = _weight_scale(scales)
        else:
            layers[expert.moe].w2[first + expert.index] = _weight_scale(scales)
    return dict(layers)


def _joined(
    per_rank: Mapping[int, Mapping[str, NodeScales]], local: int
) -> dict[str, ExpertScales]:
    result: dict[str, ExpertScales] = {}
    for rank, nodes in per_rank.items():
        for path, part in _sorted(nodes, rank * local).items():
            whole = result.setdefault(path, part)
            if whole is part:
                continue
            whole.input_dequant_scale = max(
                whole.input_dequant_scale, part.input_dequant_scale
            )
            for name in ("intermediate", "w13", "w2"):
                getattr(whole, name).update(getattr(part, name))
    return result


def _warn_unvisited(experts: Mapping[str, ExpertScales], where: str) -> None:
    idle = [
        f"{path}: {index}"
        for path, layer in experts.items()
        for index, scale in layer.intermediate.items()
        if scale == 0 or index not in layer.w13 or index not in layer.w2
    ]
    if idle:
        logger.warning_once(
            "fp8_inc: %s: %d experts have no scales, since no token visited them "
            "during calibration (%s, ...); calibrate with more samples",
            where,
            len(idle),
            ", ".join(idle[:3]),
        )
