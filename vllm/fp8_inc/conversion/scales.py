# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The scales of any source, without the names of its producer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm.fp8_inc.adjustment import resolve_adjustment
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.sources.checkpoint import layer_index
from vllm.fp8_inc.sources.folder import Folder
from vllm.fp8_inc.sources.inc.read import read_inc_scales
from vllm.fp8_inc.sources.kinds import inc_config
from vllm.fp8_inc.sources.legacy_json import read_legacy_scales
from vllm.fp8_inc.verdict import verdict

ROLES = ("k", "v", "q", "q_latent", "prob")


@dataclass(frozen=True)
class Scales:
    """What a source says.

    Attributes:
        layers: ``layers.N`` -> role -> dequant scales, one or one a head.
        made_for: The device whose format they fill.
        keys: (layer, role) -> its name in the source.
    """

    layers: Mapping[str, Mapping[str, tuple[float, ...]]]
    made_for: str
    keys: Mapping[tuple[str, str], str]

    def refit(self, device: str) -> "Scales":
        """The same for another format, as the adjustment rule has it."""
        factor = FORMATS[self.made_for].max / FORMATS[device].max
        layers = {
            layer: {role: tuple(x * factor for x in xs) for role, xs in roles.items()}
            for layer, roles in self.layers.items()
        }
        return replace(self, layers=layers, made_for=device)


def read_scales(source: str, kind: str, device: str) -> Scales:
    """Reads all scales, or raises as a server would.

    Args:
        source: A folder or a JSON.
        kind: From ``kind_of``.
        device: For INC, whose scales are made for the device that serves.

    Raises:
        ValueError: Naming file, layer, key and value.
    """
    if kind == "legacy":
        legacy = read_legacy_scales(source, None, 0, 1, FORMATS[device], {})
        made_for = legacy.adjustment.quantised_for.name
        found = {n: legacy.found[n] for n in sorted(legacy.found, key=layer_index)}
        return _of_found(found, made_for, source)
    if kind == "inc":
        inc = read_inc_scales(inc_config(source), device, 0, 1)
        # Its absorbed query is measured times the softmax scale, which is the model's.
        found = {
            layer: {role: roles[role] for role in roles if role != "q_latent"}
            for layer, roles in inc.attention.items()
        }
        return _of_found(found, inc.device, source)
    folder = Folder.open(source)
    outcome = verdict(folder, device)
    if outcome.error:
        raise ValueError(outcome.error)
    from vllm.fp8_inc.inspection import found_in

    found = {n: found_in(folder).scales.get(n, {}) for n in folder.attention_layers}
    made_for = resolve_adjustment(folder.quantization, FORMATS[device], {})
    return _of_found(found, made_for.quantised_for.name, source)


def _of_found(found: Mapping, made_for: str, source: str) -> Scales:
    layers = {
        layer: {r: roles[r].values for r in ROLES if r in roles}
        for layer, roles in found.items()
    }
    layers = {layer: roles for layer, roles in layers.items() if roles}
    if not layers:
        raise ValueError(f"{source} has no KV scales; calibrate it first")
    keys = {(n, r): found[n][r].key for n, roles in layers.items() for r in roles}
    return Scales(layers, made_for, keys)


def weights_are_quantised(folder: Folder) -> bool:
    """Whether the flavour of config.json speaks of weights too."""
    key = re.compile(r".*(weight_scale|weight_scale_inv|input_scale)")
    return any(key.fullmatch(k) for keys in folder.keys.values() for k in keys)
