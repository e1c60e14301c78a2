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
from vllm.fp8_inc.sources.inc.read import read_inc_scales
from vllm.fp8_inc.sources.inc.scales import IncScales
from vllm.fp8_inc.sources.kinds import inc_config, kind_of
from vllm.fp8_inc.sources.legacy_json import read_legacy_scales
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.store import FoundScale, ScaleStore
from vllm.fp8_inc.suspicions import suspicions
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
        excluded: Layers whose cache INC's lists keep in bf16.
    """

    scales: dict[str, dict[Role, FoundScale]] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Writes the report of ``args.source``; returns the exit code.

    Raises:
        UsageError: If it is neither a folder of a checkpoint nor a known JSON.
    """
    folder, found, verdicts = _looked_at(args)
    adjustment = verdicts[0].adjustment
    odd = suspicions(found.scales, folder.is_mla, folder.quantization)
    report = Report("scales", _table(folder, found, adjustment))
    report.facts = _facts(folder, found, verdicts, odd)
    report.lines = _lines(folder, found, verdicts, odd)
    if args.capacity:
        if isinstance(folder, _NoModel):
            raise UsageError("--capacity: name the checkpoint with --model")
        report.lines += capacity_lines(folder)
    report.write(args.format)
    # Unit scales serve, but nobody calibrated them.
    total = len(folder.attention_layers)
    weak = odd or any(len(v.loaded) < total for v in verdicts)
    failed = any(v.error for v in verdicts) or (args.strict and weak)
    return FINDING if failed else FINE


def _looked_at(args: argparse.Namespace) -> tuple[Folder, Found, list[Verdict]]:
    """The model, what the source holds, and what a server makes of it."""
    devices = [args.device] if args.device else sorted(FORMATS)
    source, kind = args.source, kind_of(args.source)
    if kind == "checkpoint":
        if args.model:
            raise UsageError(f"--model goes with a JSON, but {source} is a folder")
        folder = Folder.open(source)
        return folder, found_in(folder), [verdict(folder, d) for d in devices]
    if kind == "inc":
        return _looked_at_inc(args)
    found = _found_in_legacy(source)
    folder = _model_of(args, found)
    return folder, found, [verdict(folder, d, source) for d in devices]


def _model_of(args: argparse.Namespace, found: Found) -> Folder:
    """The model that --model names, else the layers of the file itself."""
    if args.model:
        return Folder.open(args.model)
    numbers = sorted(layer_index(layer) for layer in found.scales)
    config = {"num_hidden_layers": max(numbers, default=-1) + 1}
    return replace(_NoModel(Path(args.source), config), numbers=tuple(numbers))


def _looked_at_inc(args: argparse.Namespace) -> tuple[Folder, Found, list[Verdict]]:
    """INC's scales are made for the device that serves: gaudi3 unless told."""
    device, found = args.device or "gaudi3", Found()
    source = inc_config(args.source)
    try:
        inc = read_inc_scales(source, device, 0, 1)
        if args.model:
            _check_inc_fits(inc, Folder.open(args.model))
    except ValueError as error:
        return _model_of(args, found), found, [Verdict(device, str(error))]
    found.scales = {layer: dict(roles) for layer, roles in inc.attention.items()}
    for roles in found.scales.values():
        for scale in roles.values():
            found.files[scale.key] = Path(inc.files[0])
    found.excluded = sorted(inc.excluded)
    folder = _model_of(args, found)
    fmt = FORMATS[inc.device]
    said = f"fp8_inc: INC, {inc.config.scale_method.method}, {inc.ranks}"
    loaded = tuple(n for n in folder.attention_layers if n in found.scales)
    adjustment = Adjustment(fmt, fmt, "INC")
    return folder, found, [Verdict(device, None, adjustment, loaded, said=(said,))]


def _check_inc_fits(inc: IncScales, folder: Folder) -> None:
    """Raises as a server does for a layer that was not measured, or that is not there.

    Raises:
        ValueError: Naming it.
    """
    for layer in folder.attention_layers:
        inc.scales_of(f"model.{layer}.self_attn.attn", folder.is_mla)
    for layer, roles in inc.attention.items():
        if layer_index(layer) >= folder.text_config["num_hidden_layers"]:
            key = next(iter(roles.values())).key
            raise ValueError(
                f"{inc.files[0]}: {key} belongs to no attention layer of the model "
                f"{folder.path}; name the calibration of this one"
            )


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
    for layer, roles in read_legacy_scales(path, None, 0, 1, GAUDI3).found.items():
        found.scales[layer] = dict(roles)
        found.files[roles["k"].key] = Path(path)
    return found


def _table(folder: Folder, found: Found, adjustment: Adjustment | None) -> Table:
    rows = []
    maximum = (adjustment.quantised_for if adjustment else GAUDI3).max
    served = folder.attention_layers
    for layer in sorted({*served, *found.scales, *found.excluded}, key=layer_index):
        roles = found.scales.get(layer, {})
        more = [role for role in roles if role not in get_args(Role)]
        for role in cast(list[Role], [*get_args(Role), *more]):
            if role in roles:
                rows.append(_row(layer, role, roles[role], maximum, found, served))
            elif role in ("k", "v"):
                status = "bf16" if layer in found.excluded else "missing"
                rows.append((layer, role, None, None, None, status, None, None))
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
    numbers = scale.values
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
    if found.excluded:
        lines.append(f"in bf16 by INC's lists: {', '.join(found.excluded)}")
    if found.ignored:
        lines.append(
            f"ignored: {len(found.ignored)} tensors of towers, or no scales "
            f"({found.ignored[0]})"
        )
    if not (found.scales or found.errors or any(v.error for v in verdicts)):
        lines.append(
            "to do: no scale is stored. Calibrate: vllm kv-scales calibrate "
            f"{folder.path} --output-dir DIR --dataset FILE"
        )
    return lines
