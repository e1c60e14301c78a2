# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes a calibration as a checkpoint, or as INC's files."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import torch

from vllm.fp8_inc.adjustment import FLAVOR_KEY, FLAVOR_OF
from vllm.fp8_inc.calibration.inc_files import CONFIG_NAME, inc_files
from vllm.fp8_inc.calibration.result import Calibration
from vllm.fp8_inc.sources.folder import Folder
from vllm.fp8_inc.sources.writer import write_checkpoint
from vllm.fp8_inc.whole_folder import new_folder

RESULT = "kv-scales-calibration.json"


def export(
    folder: Folder, calibration: Calibration, out: Path, args: argparse.Namespace
) -> None:
    """Writes ``out`` in the form that ``args.export`` names."""
    if args.export == "inc":
        with new_folder(out) as part:
            files = inc_files(
                calibration, args.scale_method, args.tensor_parallel_size, out
            )
            for name, content in files.items():
                path = part / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(content, indent=1) + "\n")
            (part / RESULT).write_text(calibration.to_json())
        return
    write_checkpoint(
        folder,
        out,
        scale_tensors(folder, calibration),
        quantization_config(folder, calibration),
        args.copy,
        {RESULT: calibration.to_json()},
    )


def scale_tensors(folder: Folder, calibration: Calibration) -> dict[str, torch.Tensor]:
    """llm-compressor's names, and q_latent_scale: [1], or [heads, 1, 1]; float32."""
    tensors = {}
    for layer, roles in calibration.dequant_scales().items():
        for role in roles.keys() & {"k", "v", "q", "q_latent"}:
            key = f"{folder.attention_module(layer)}.{role}_scale"
            tensor = torch.tensor(roles[role], dtype=torch.float32)
            per_head = calibration.granularity == "head"
            tensors[key] = tensor.view(-1, 1, 1) if per_head else tensor
    return tensors


def quantization_config(folder: Folder, calibration: Calibration) -> dict[str, Any]:
    """The checkpoint's own, or one without FP8 weights; with a KV scheme."""
    strategy = "attn_head" if calibration.granularity == "head" else "tensor"
    own = dict(folder.quantization) or {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "provider": "kv-scales",
        "config_groups": {},
        "ignore": [],
    }
    for name in ("kv_cache_quant_algo", "export"):
        own.pop(name, None)
    own["kv_cache_scheme"] = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    own[FLAVOR_KEY] = FLAVOR_OF[calibration.made_for]
    return own


def serve_command(out: Path, args: argparse.Namespace) -> str:
    """What serves the result."""
    options = json.dumps({"fp8_inc": {"device": args.device}})
    model, environment = out, ""
    if args.export == "inc":
        model = Path(args.model)
        environment = f"QUANT_CONFIG={shlex.quote(str(out / CONFIG_NAME))} "
    return environment + shlex.join(
        [
            *("vllm", "serve", str(model), "--kv-cache-dtype", "fp8_inc"),
            *("--additional-config", options),
        ]
    )
