# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The dequant scales of every module, cached by INC or computed as INC does."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.fp8_inc.sources.inc.files import NodeRecord
from vllm.fp8_inc.sources.inc.methods import HARDWARE, dequant_scales
from vllm.fp8_inc.sources.inc.nodes import type_of, uses_outputs
from vllm.fp8_inc.sources.inc.rules import ScaleRule
from vllm.fp8_inc.sources.inc.schema import QuantConfig


@dataclass(frozen=True)
class NodeScales:
    """The dequant scales of one module; 0 stands for what was never visited.

    Attributes:
        inputs: By input, as INC counts them: the attention has the softmax as its
            fourth, ``moe_op`` has the activation inside each expert after its first.
        weight: One, one per output channel, or None where there is no weight or its
            scale follows from the weight itself.
    """

    inputs: tuple[float, ...]
    weight: tuple[float, ...] | None = None


def compute_scales(
    config: QuantConfig, device: str, measured: Mapping[str, NodeRecord]
) -> dict[str, NodeScales]:
    """Computes the scales of ``measured``.

    Args:
        config: With the rules.
        device: Whose full scale and hardware scales count.
        measured: Path -> measurement.
    """
    asked = {path: _questions(config, path, node) for path, node in measured.items()}
    # A large model has 10,000s of modules: one pass for each rule, not for each.
    amax_by_rule: dict[_RuleKey, set[float]] = defaultdict(set)
    rules: dict[_RuleKey, ScaleRule] = {}
    for rule, amax in (question for each in asked.values() for question in each):
        if rule is not None:
            rules[_key(rule)] = rule
            amax_by_rule[_key(rule)].add(amax)
    answers: dict[tuple[_RuleKey, float], float] = {}
    for key, found in amax_by_rule.items():
        scales = dequant_scales(list(found), rules[key], device, config.dtype)
        answers |= {(key, amax): scale for amax, scale in zip(found, scales)}

    def scale(rule: ScaleRule | None, amax: float) -> float | None:
        if rule is None:
            return None
        return answers[_key(rule), amax] if amax else 0.0

    result = {}
    for path, questions in asked.items():
        *inputs, weight = (scale(*question) for question in questions)
        result[path] = NodeScales(
            tuple(inputs),  # type: ignore[arg-type]
            None if weight is None else (weight,),
        )
    return result


def _questions(
    config: QuantConfig, path: str, record: NodeRecord
) -> list[tuple[ScaleRule | None, float]]:
    """Rule and amax of each input, and of the weight last; no rule: no scale."""
    scheme = config.scheme_of(path, type_of(path))
    questions: list[tuple[ScaleRule | None, float]] = [
        (scheme.activation, max(amax)) for amax in input_amax(path, record)
    ]
    if record.weight is None or not _is_per_tensor_maxabs(scheme.weight):
        return [*questions, (None, 0.0)]
    return [*questions, (scheme.weight, max(record.weight))]


_RuleKey = tuple[tuple[str, str, str], float]


def _key(rule: ScaleRule) -> _RuleKey:
    return rule.kind, rule.backoff


def cached_scales(cached: Mapping[str, NodeRecord]) -> dict[str, NodeScales]:
    """The scales of a cached scale file.

    Of an amax of 0 INC makes the smallest scale of the hardware. On Gaudi3 that is
    2^-55, which nothing else can be; Gaudi2's 1/256 says nothing.
    """
    unvisited = 2.0 ** HARDWARE["gaudi3"].lowest
    return {
        path: NodeScales(
            tuple(0.0 if max(s) <= unvisited else max(s) for s in record.inputs),
            record.weight,
        )
        for path, record in cached.items()
    }


def input_amax(path: str, record: NodeRecord) -> tuple[tuple[float, ...], ...]:
    """What INC takes for the inputs of the module, in its order."""
    if type_of(path) == "B2BMatmul" and record.outputs:
        # What it reads is padded with garbage: INC takes the output for its input.
        return record.inputs[:1] + record.outputs[:1]
    if uses_outputs(path):
        return record.inputs + record.outputs[1:]
    return record.inputs


def _is_per_tensor_maxabs(rule: ScaleRule) -> bool:
    return rule.granularity == "PTS" and rule.scale_value_type != "OPT"
