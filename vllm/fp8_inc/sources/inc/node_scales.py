# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The dequant scales of every module, cached by INC or computed as INC does."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.fp8_inc.sources.inc.files import NodeRecord
from vllm.fp8_inc.sources.inc.methods import HARDWARE, dequant_scale
from vllm.fp8_inc.sources.inc.nodes import is_moe, type_of
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
    """Computes the scales of ``measured``, amax by node.

    Args:
        config: With the rules.
        device: Whose full scale and hardware scales count.
        measured: Path -> measurement.
    """
    scales = {}
    for path, record in measured.items():
        scheme = config.scheme_of(path, type_of(path))

        def scale(amax: tuple[float, ...], rule: ScaleRule) -> float:
            if not any(amax):
                return 0.0
            return dequant_scale(amax, rule, device, config.dtype)

        weight = None
        if record.weight is not None and _is_per_tensor_maxabs(scheme.weight):
            weight = (scale(record.weight, scheme.weight),)
        inputs = tuple(
            scale(amax, scheme.activation) for amax in input_amax(path, record)
        )
        scales[path] = NodeScales(inputs, weight)
    return scales


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
    kind = type_of(path)
    if kind == "B2BMatmul" and record.outputs:
        # What it reads is padded with garbage: INC takes the output for its input.
        return record.inputs[:1] + record.outputs[:1]
    if kind == "ModuleFusedSDPA" or is_moe(path):
        return record.inputs + record.outputs[1:]
    return record.inputs


def _is_per_tensor_maxabs(rule: ScaleRule) -> bool:
    return rule.granularity == "PTS" and rule.scale_value_type != "OPT"
