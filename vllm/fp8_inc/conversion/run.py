# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``vllm kv-scales convert``: validates all, then writes all or nothing."""

import argparse
from pathlib import Path

from vllm.fp8_inc.adjustment import resolve_adjustment
from vllm.fp8_inc.conversion.forms import FORMS, Form
from vllm.fp8_inc.conversion.scales import (
    ROLES,
    Scales,
    read_scales,
    weights_are_quantised,
)
from vllm.fp8_inc.conversion.write import write
from vllm.fp8_inc.formats import GAUDI3
from vllm.fp8_inc.report import FINE, Report, Table, UsageError
from vllm.fp8_inc.sources.checkpoint import layer_index, match_scale_key
from vllm.fp8_inc.sources.folder import Folder
from vllm.fp8_inc.sources.kinds import kind_of

# INC measures the absorbed query times the softmax scale, which is the model's.
_OF_INC = tuple(role for role in ROLES if role != "q_latent")
_COLUMNS = (
    *("layer", "role", "from", "dequant_scale", "to", "dequant_scale_there"),
    "change",
)


def run(args: argparse.Namespace) -> int:
    """Converts ``args.source``; returns the exit code.

    Raises:
        UsageError: For a combination that there is not.
        ValueError: For a source that no server would load, or scales that the
            target cannot hold.
    """
    kind = kind_of(args.source)
    _check(args, kind)
    scales = read_scales(args.source, kind, args.device or "gaudi3")
    path = args.source if kind == "checkpoint" else args.model
    # A JSON alone is taken for one of MHA.
    folder = Folder.open(path) if path else Folder(Path(), {"num_hidden_layers": 0})
    _check_names(args, kind, folder)
    target = _refitted(args, kind, scales, folder)
    target, keys, lost = _fitted(args, target, folder)
    if lost and not args.lossy:
        raise ValueError(
            f"{args.to} cannot hold {'; '.join(lost)}. --lossy drops the former and "
            "takes the largest of the latter"
        )
    if not args.dry_run:
        write(args, folder, target, keys)
    report = Report("scales", _difference(scales, target, keys))
    report.facts = {
        "from": args.from_,
        "to": args.to,
        "made_for": [scales.made_for, target.made_for],
        "lost": lost,
        "written": not args.dry_run,
    }
    report.lines = [
        f"{scales.made_for} -> {target.made_for}",
        *(f"lost: {line}" for line in lost),
        f"{'would write' if args.dry_run else 'wrote'} {args.destination}",
    ]
    report.write(args.format)
    return FINE


def _check(args: argparse.Namespace, kind: str) -> None:
    known = {"legacy": ["legacy"], "inc": ["inc"], "checkpoint": [*FORMS]}[kind]
    if args.from_ not in (None, *known):
        raise UsageError(
            f"{args.source} is not {args.from_}; it is {' or '.join(known)}"
        )
    if kind != "checkpoint" and args.to in FORMS and not args.model:
        raise UsageError(f"--to {args.to} writes a checkpoint; name it with --model")
    if kind == "checkpoint" and args.model:
        raise UsageError("--model goes with a JSON, but the source is a checkpoint")
    if Path(args.destination).exists():
        raise UsageError(f"{args.destination} is there already; name another")


def _check_names(args: argparse.Namespace, kind: str, folder: Folder) -> None:
    """--from is a promise about every name."""
    if kind != "checkpoint" or args.from_ is None:
        return
    form = FORMS[args.from_]
    names = {*form.names.values(), form.fused}
    for path, key, _ in folder.scale_tensors:
        found = match_scale_key(key)
        if found and found.use == "dequant_scale" and found.name not in names:
            raise ValueError(
                f"{path}: {key} is no name of {args.from_}, which has "
                f"{sorted(filter(None, names))}; leave out --from"
            )


def _refitted(
    args: argparse.Namespace, kind: str, scales: Scales, folder: Folder
) -> Scales:
    """For the device that --device names; without it the flavour is kept."""
    if args.to in FORMS and weights_are_quantised(folder):
        # One flavour speaks of weights and cache.
        own = read_flavour(folder)
        if args.device not in (None, own):
            raise UsageError(
                f"--device {args.device}: the FP8 weights of {folder.path} were made "
                f"for {own}, and config.json has one flavour for both; leave it out. "
                "A server fits the scales to its device"
            )
        return scales if scales.made_for == own else scales.refit(own)
    if args.device in (None, scales.made_for):
        return scales
    return scales.refit(args.device)


def read_flavour(folder: Folder) -> str:
    """The device that a checkpoint was made for."""
    return resolve_adjustment(folder.quantization, GAUDI3, {}).quantised_for.name


def _fitted(
    args: argparse.Namespace, scales: Scales, folder: Folder
) -> tuple[Scales, dict[tuple[str, str], str], list[str]]:
    """What the target holds, under which keys, and what is lost."""
    form = FORMS.get(args.to)
    held = (
        tuple(form.names) if form else {"legacy": ("k", "v"), "inc": _OF_INC}[args.to]
    )
    latent = folder.is_mla and (args.to == "inc" or bool(form and form.fused))
    fused = args.to == "legacy" or latent
    heads = bool(form and form.per_head)
    layers: dict[str, dict[str, tuple[float, ...]]] = {}
    dropped: set[str] = set()
    merged: set[str] = set()
    keys = {}
    for layer, roles in scales.layers.items():
        new = {role: xs for role, xs in roles.items() if role in held}
        dropped |= roles.keys() - new.keys()
        if not heads and any(len(xs) > 1 for xs in new.values()):
            merged.add("a scale a head")
            new = {role: (max(xs),) for role, xs in new.items()}
        if fused and new["k"] != new["v"]:
            merged.add("unequal k and v")
            new["k"] = new["v"] = max(new["k"], new["v"])
        layers[layer] = new
        for role in new:
            keys[layer, role] = _key(args.to, form, fused, layer, role, folder)
    lost = [f"the scales of {', '.join(sorted(dropped))}"] if dropped else []
    lost += sorted(merged)
    return Scales(layers, scales.made_for, scales.keys), keys, lost


def _key(
    to: str, form: Form | None, fused: bool, layer: str, role: str, folder: Folder
) -> str:
    if to == "legacy":
        return f"kv_cache.scaling_factor.0.{layer_index(layer)}"
    if form is None:
        return inc_node(layer, role, folder.is_mla)
    name = form.names[role]
    if fused and role in ("k", "v"):
        name = form.fused or name
    return f"{folder.attention_module(layer)}.{name}"


def inc_node(layer: str, role: str, mla: bool) -> str:
    """The module of vllm-gaudi that quantises a role."""
    if mla:
        impl, cache = "mla_attn.mla_attn.impl", "latent_cache_k"
    else:
        impl, cache = "attn.impl", f"{role}_cache"
    name = {"q": "fused_scaled_dot_product_attention", "prob": "matmul_av"}
    return f"model.{layer}.self_attn.{impl}.{name.get(role, cache)}"


def _difference(
    before: Scales, after: Scales, keys: dict[tuple[str, str], str]
) -> Table:
    rows = []
    for (layer, role), key in before.keys.items():
        old = before.layers[layer][role]
        new = after.layers[layer].get(role)
        change = "dropped" if new is None else "same" if new == old else "changed"
        there = None if new is None else _cell(new)
        to = keys.get((layer, role))
        rows.append((layer, role, key, _cell(old), to, there, change))
    return Table(_COLUMNS, rows)


def _cell(numbers: tuple[float, ...]) -> float | list[float]:
    return numbers[0] if len(numbers) == 1 else list(numbers)
