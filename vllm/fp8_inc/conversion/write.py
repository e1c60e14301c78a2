# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes scales as a checkpoint, as INC's files, or as a legacy JSON."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from vllm.fp8_inc.adjustment import FLAVOR_OF
from vllm.fp8_inc.conversion.forms import FORMS, quantization_config
from vllm.fp8_inc.conversion.scales import Scales
from vllm.fp8_inc.sources.checkpoint import layer_index
from vllm.fp8_inc.sources.folder import Folder
from vllm.fp8_inc.sources.writer import write_checkpoint
from vllm.fp8_inc.whole_folder import new_file, new_folder

_INC_CONFIG = "quantize.json"


def write(
    args: argparse.Namespace,
    folder: Folder,
    scales: Scales,
    keys: dict[tuple[str, str], str],
) -> None:
    out = Path(args.destination)
    if args.to == "legacy":
        _write_legacy(out, folder, scales)
    elif args.to == "inc":
        _write_inc(out, scales, keys)
    else:
        _write_checkpoint(args, folder, out, scales, keys)


def _write_checkpoint(
    args: argparse.Namespace,
    folder: Folder,
    out: Path,
    scales: Scales,
    keys: dict[tuple[str, str], str],
) -> None:
    form = FORMS[args.to]
    tensors = {}
    per_head = False
    for (layer, role), key in keys.items():
        numbers = scales.layers[layer][role]
        tensor = torch.tensor(numbers, dtype=torch.float32)
        per_head |= len(numbers) > 1
        shape = form.shape if len(numbers) == 1 else (-1, 1, 1)
        tensors[key] = tensor.reshape(shape)
    config = quantization_config(
        form, folder.quantization, per_head, FLAVOR_OF[scales.made_for]
    )
    write_checkpoint(folder, out, tensors, config, args.copy)


def _write_legacy(out: Path, folder: Folder, scales: Scales) -> None:
    numbers = {
        str(layer_index(layer)): roles["k"][0] for layer, roles in scales.layers.items()
    }
    content: dict[str, Any] = {
        "model_type": folder.config.get("model_type"),
        "kv_cache": {
            "dtype": FLAVOR_OF[scales.made_for],
            "scaling_factor": {"0": numbers},
        },
    }
    with new_file(out) as part:
        part.write_text(json.dumps(content, indent=1) + "\n")


def _write_inc(out: Path, scales: Scales, keys: dict[tuple[str, str], str]) -> None:
    """A quant-config and the scale file it finds: INC's cache of computed scales."""
    nodes: dict[str, Any] = {}
    for (layer, role), key in keys.items():
        of = {r: x for r, (x,) in scales.layers[layer].items()}
        inputs = {"q": ("q", "k", "v", "prob"), "prob": ("prob", "v")}.get(role, role)
        numbers = [of[r] for r in inputs if r in of]
        nodes[key] = {"inputs": numbers, "outputs": [], "params": {}}
    with new_folder(out) as part:
        folder = "inc_output"
        config = {
            "mode": "QUANTIZE",
            "observer": "maxabs",
            "scale_method": "maxabs_arbitrary",
            "allowlist": {"types": [], "names": []},
            "blocklist": {"types": ["Linear"], "names": []},
            "dump_stats_path": str(out.resolve() / folder / folder),
        }
        (part / _INC_CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        (part / folder).mkdir()
        name = f"{folder}_hooks_maxabs_MAXABS_ARBITRARY_0_1.json"
        content = {"LocalRank": 0, "Mode": "Scale", "Nodes": nodes}
        (part / folder / name).write_text(json.dumps(content, indent=1) + "\n")
