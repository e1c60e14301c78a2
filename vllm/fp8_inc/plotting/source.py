# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a figure shows of one source."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from vllm.fp8_inc.calibration.export import RESULT
from vllm.fp8_inc.conversion.scales import read_scales
from vllm.fp8_inc.formats import FORMATS, Fp8Format
from vllm.fp8_inc.sources.checkpoint import layer_index
from vllm.fp8_inc.sources.folder import Folder
from vllm.fp8_inc.sources.kinds import kind_of

Series = dict[int, float]  # layer number -> value


@dataclass(frozen=True)
class Source:
    """Scales, and what a calibration measured where it lies beside them.

    Attributes:
        label: For the legend.
        format: That the scales fill.
        scales: Role -> layer -> dequant scale, the largest of the heads. MLA has
            latent for k and v.
        amax: The same of magnitudes: measured, else implied by the scale.
        measured: Whether ``amax`` was measured.
        error: Role -> layer -> squared error of attention's output over its square.
    """

    label: str
    format: Fp8Format
    scales: dict[str, Series]
    amax: dict[str, Series]
    measured: bool
    error: dict[str, Series] = field(default_factory=dict)


def read_source(path: str, device: str) -> Source:
    """Reads a checkpoint, INC's files or a legacy JSON.

    Raises:
        ValueError: As a server would.
    """
    kind = kind_of(path)
    found = read_scales(path, kind, device)
    mla = kind == "checkpoint" and Folder.open(path).is_mla
    scales: dict[str, Series] = {}
    for layer, roles in found.layers.items():
        shown = {role: max(roles[role]) for role in ("k", "v", "q") if role in roles}
        if mla:
            shown = {"latent": max(shown.pop("k"), shown.pop("v")), **shown}
        for role, value in shown.items():
            scales.setdefault(role, {})[layer_index(layer)] = value
    fmt = FORMATS[found.made_for]
    amax = {r: {n: x * fmt.max for n, x in s.items()} for r, s in scales.items()}
    calibration = Path(path) / RESULT
    if not calibration.is_file():
        return Source(_label(path), fmt, scales, amax, False)
    content = json.loads(calibration.read_text())
    measured = _measured(content["amax"])
    error: dict[str, Series] = {}
    for layer, roles in content["error"].items():
        for role, numbers in roles.items():
            error.setdefault(role, {})[layer_index(layer)] = max(numbers)
    return Source(_label(path), fmt, scales, measured, True, error)


def _measured(amax: dict[str, dict[str, list[float]]]) -> dict[str, Series]:
    result: dict[str, Series] = {}
    for layer, roles in amax.items():
        largest = {role: max(numbers) for role, numbers in roles.items()}
        if "kv_c" in largest:
            latent = max(largest["kv_c"], largest["k_pe"])
            largest = {"latent": latent, "q": largest["q"]}
        for role, value in largest.items():
            result.setdefault(role, {})[layer_index(layer)] = value
    return result


def _label(path: str) -> str:
    whole = Path(path).resolve()
    return whole.stem if whole.is_file() else whole.name
