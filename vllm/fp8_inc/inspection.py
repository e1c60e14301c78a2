# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``vllm kv-scales inspect``: every scale, and what a server would do with it."""

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from vllm.fp8_inc.adjustment import FLAVOR_KEY, Adjustment
from vllm.fp8_inc.capacity import capacity_lines
from vllm.fp8_inc.formats import FORMATS, GAUDI3
from vllm.fp8_inc.report import FINDING, FINE, Report, Table, UsageError
from vllm.fp8_inc.sources.checkpoint import layer_index, match_scale_key
from vllm.fp8_inc.sources.folder import Folder
from vllm.fp8_inc.sources.legacy_json import read_legacy_scales
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.store import FoundScale, ScaleStore
from vllm.fp8_inc.suspicions import suspicions, values
from vllm.fp8_inc.verdict import Verdict, verdict

_COLUMNS = (
    *("layer", "role", "dequant_scale", "amax", "granularity", "status"),
    *("key", "file"),
)


@dataclass
class Found:
    """The scales of a source.

    Attributes:
        scales: Layer -> role -> scale, only what can be read.
        files: Key -> the file that holds it.
        errors: Key -> what is wrong with it.
        ignored: Keys that are scales of nothing that is served.
    """

    scales: dict[str, dict[Role, FoundScale]] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Writes the report of ``args.source``; returns the exit code.

    Raises:
        UsageError: If it is neither a folder of a checkpoint nor a known JSON.
    """
    legacy, folder = _opened(args.source, args.model)
    devices = [args.device] if args.device else sorted(FORMATS)
    verdicts = [verdict(folder, device, legacy) for device in devices]
    found = _found_in_legacy(legacy) if legacy else found_in(folder)
    adjustment = verdicts[0].adjustment
    odd = suspicions(found.scales, folder.is_mla, folder.quantization)
    report = Report("scales", _table(folder, found, adjustment))
    report.facts = _facts(folder, found, verdicts, odd)
    report.lines = _lines(folder, found, verdicts, odd)
    if args.capacity:
        report.lines += capacity_lines(folder)
    report.write(args.format)
    # Unit scales serve, but nobody calibrated them.
    weak = odd or any(len(v.loaded) < len(v.scales) for v in verdicts)
    failed = any(v.error for v in verdicts) or (args.strict and weak)
    return FINDING if failed else FINE


def _opened(source: str, model: str | None) -> tuple[str | None, Folder]:
    """The JSON, where ``source`` is one, and the checkpoint it is for."""
    path = Path(source)
    if path.is_dir():
        if model:
            raise UsageError(f"--model goes with a JSON, but {source} is a folder")
        return None, Folder.open(path)
    if not path.is_file():
        raise UsageError(f"{source} is no local folder and no file")
    if model:
        return source, Folder.open(model)
    layers = read_legacy_scales(source, None, 0, 1).dequant_scales
    folder = _NoModel(path.parent, {"num_hidden_layers": max(layers) + 1})
    return source, replace(folder, numbers=tuple(sorted(layers)))


@dataclass(frozen=True)
class _NoModel(Folder):
    """Stands for the model of a JSON that is looked at alone."""

    numbers: tuple[int, ...] = ()

    @property
    def attention_layers(self) -> list[str]:  # type: ignore[override]
        return [f"layers.{n}" for n in self.numbers]

    scale_tensors = ()  # type: ignore[assignment]


def found_in(folder: Folder) -> Found:
    """Reads every scale of a checkpoint, one by one, and keeps what is wrong."""
    found, store = Found(), ScaleStore(str(folder.path))
    for path, key, tensor in folder.scale_tensors:
        found.files.setdefault(key, path)
        try:
            store.take(key, tensor)
        except ValueError as error:
            found.errors[key] = str(error)
        scale = match_scale_key(key)
        if scale and (scale.tower or scale.use == "ignored"):
            found.ignored.append(key)
    found.scales = store.found
    return found


def _found_in_legacy(path: str) -> Found:
    found = Found()
    for n, value in read_legacy_scales(path, None, 0, 1).dequant_scales.items():
        scale = FoundScale(f"kv_cache.scaling_factor.*.{n}", value)
        found.scales[f"layers.{n}"] = {"k": scale, "v": scale}
        found.files[scale.key] = Path(path)
    return found


def _table(folder: Folder, found: Found, adjustment: Adjustment | None) -> Table:
    rows = []
    maximum = (adjustment.quantised_for if adjustment else GAUDI3).max
    served = folder.attention_layers
    for layer in sorted({*served, *found.scales}, key=layer_index):
        roles = found.scales.get(layer, {})
        for role in cast(tuple[Role, ...], get_args(Role)):
            if role in roles:
                rows.append(_row(layer, role, roles[role], maximum, found, served))
            elif role in ("k", "v"):
                rows.append((layer, role, None, None, None, "missing", None, None))
    for key, error in found.errors.items():
        scale = match_scale_key(key)
        role = " ".join(scale.roles) if scale else ""
        layer = scale.layer if scale else ""
        file = found.files[key].name
        rows.append((layer, role, None, None, None, f"error: {error}", key, file))
    return Table(_COLUMNS, rows)


def _row(
    layer: str,
    role: Role,
    scale: FoundScale,
    maximum: float,
    found: Found,
    served: list[str],
) -> tuple[Any, ...]:
    numbers = values(scale)
    one = len(numbers) == 1
    return (
        layer,
        role,
        numbers[0] if one else numbers,
        numbers[0] * maximum if one else [n * maximum for n in numbers],
        "tensor" if one else f"head ({len(numbers)})",
        "ok" if layer in served else "of no layer here",
        scale.key,
        found.files[scale.key].name,
    )


def _facts(
    folder: Folder, found: Found, verdicts: list[Verdict], odd: list[str]
) -> dict[str, Any]:
    return {
        "source": str(folder.path),
        "attention": "MLA" if folder.is_mla else "MHA",
        "layers": len(folder.attention_layers),
        "flavour": folder.quantization.get(FLAVOR_KEY),
        "devices": {
            v.device: {
                "starts": v.error is None,
                "error": v.error,
                "loaded": len(v.loaded),
                "made_for": v.adjustment and v.adjustment.quantised_for.name,
                "factor": v.adjustment and v.adjustment.factor,
                "log": v.said,
            }
            for v in verdicts
        },
        "suspicious": odd,
        "ignored": found.ignored,
    }


def _lines(
    folder: Folder, found: Found, verdicts: list[Verdict], odd: list[str]
) -> list[str]:
    total = len(folder.attention_layers)
    lines = []
    for v in verdicts:
        if v.error:
            lines.append(f"{v.device}: a server does not start: {v.error}")
            continue
        lines.append(f"{v.device}: loads {len(v.loaded)} of {total} layers")
        lines += [f"  {line}" for line in v.said]
    lines += [f"suspicious: {line}" for line in odd]
    if found.ignored:
        lines.append(
            f"ignored: {len(found.ignored)} tensors of towers, or no scales "
            f"({found.ignored[0]})"
        )
    if not (found.scales or found.errors):
        lines.append(
            "to do: no scale is stored. Calibrate: vllm kv-scales calibrate "
            f"{folder.path} --output-dir DIR --dataset FILE"
        )
    return lines
