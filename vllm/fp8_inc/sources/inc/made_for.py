# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Tells for which device INC cached scales; their file does not say it."""

import math
from collections.abc import Mapping

from vllm.fp8_inc.sources.inc.files import NodeRecord
from vllm.fp8_inc.sources.inc.methods import HARDWARE
from vllm.fp8_inc.sources.inc.node_scales import NodeScales, compute_scales
from vllm.fp8_inc.sources.inc.nodes import type_of
from vllm.fp8_inc.sources.inc.schema import QuantConfig
from vllm.logger import init_logger

logger = init_logger(__name__)


def check_made_for(
    config: QuantConfig,
    device: str,
    cached: Mapping[str, NodeScales],
    measured: Mapping[str, NodeRecord],
    where: str,
) -> None:
    """Refuses cached scales that were made for the other device, where that shows.

    Beside measurements it shows in the numbers; alone it shows in hardware-aligned
    scales, of which Gaudi2 has four and Gaudi3 all powers of two.

    Args:
        config: With the rules that the scales should follow.
        device: For which the scales should be.
        cached: Scales of one rank.
        measured: Measurements of the same rank, perhaps none.
        where: The file, for messages.

    Raises:
        ValueError: Saying how it shows, and the way out.
    """
    other = next(name for name in HARDWARE if name != device)
    agreeing, total = _agreement(config, device, cached, measured)
    if total:
        others, _ = _agreement(config, other, cached, measured)
        if others > agreeing and agreeing < total / 2:
            _refuse(
                f"{others} of {total} scales are those of {other}, {agreeing} those of "
                f"{device}",
                device,
                other,
                where,
            )
        if agreeing < total / 2:
            logger.warning_once(
                "fp8_inc: %s: %d of %d scales are not what scale_method makes of the "
                "measurements beside it; INC takes the file all the same, and so does "
                'this. "recalc_scales": true computes them anew',
                where,
                total - agreeing,
                total,
            )
        return
    if config.scale_method.method.startswith(("MAXABS_HW", "ACT_MAXABS_HW")):
        _check_hardware(device, other, cached, where)


def _agreement(
    config: QuantConfig,
    device: str,
    cached: Mapping[str, NodeScales],
    measured: Mapping[str, NodeRecord],
) -> tuple[int, int]:
    """How many input scales are what ``device`` would have, and of how many."""
    common = {path: record for path, record in measured.items() if path in cached}
    agreeing = total = 0
    for path, computed in compute_scales(config, device, common).items():
        pairs = list(zip(computed.inputs, cached[path].inputs))
        agreeing += sum(one == other for one, other in pairs)
        total += len(pairs)
    return agreeing, total


def _check_hardware(
    device: str, other: str, cached: Mapping[str, NodeScales], where: str
) -> None:
    for path, scales in cached.items():
        for scale in scales.inputs:
            if not _is_hardware_scale(scale, device):
                _refuse(
                    f"{path} has {scale:g}, which is no scale of {device}'s hardware",
                    device,
                    other,
                    where,
                )
    if device == "gaudi3" and _has_gaudi2_softmax(cached):
        _refuse(
            "every scale is one of Gaudi2's four, that of the softmax too",
            device,
            other,
            where,
        )


def _is_hardware_scale(scale: float, device: str) -> bool:
    hardware = HARDWARE[device]
    mantissa, exponent = math.frexp(scale)
    exponent -= 1
    return (
        mantissa == 0.5
        and hardware.lowest <= exponent <= hardware.highest
        and exponent % hardware.step == 0
    )


def _has_gaudi2_softmax(cached: Mapping[str, NodeScales]) -> bool:
    """A softmax has amax 1, hence 1/64 on Gaudi3 and 1/16 on Gaudi2."""
    softmax = [
        scales.inputs[3]
        for path, scales in cached.items()
        if type_of(path) == "ModuleFusedSDPA" and len(scales.inputs) == 4
    ]
    everything = (scale for scales in cached.values() for scale in scales.inputs)
    return bool(softmax) and all(
        _is_hardware_scale(scale, "gaudi2") for scale in everything
    )


def _refuse(why: str, device: str, other: str, where: str) -> None:
    keep = (
        f', or "device_for_scales": "{other.upper()}" to keep these'
        if other == "gaudi2"
        else ""
    )
    raise ValueError(
        f"{where}: was made for {other}, not for {device}: {why}. Set "
        f'"recalc_scales": true to compute them from the measurements{keep}'
    )
