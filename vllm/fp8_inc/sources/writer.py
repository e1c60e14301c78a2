# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The same checkpoint with other KV scales."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm.fp8_inc.sources.checkpoint import match_scale_key
from vllm.fp8_inc.sources.folder import INDEX, Folder
from vllm.fp8_inc.whole_folder import copy_small_files, link_or_copy, new_folder

SHARD = "kv-scales.safetensors"


def write_checkpoint(
    folder: Folder,
    out: Path,
    scales: Mapping[str, torch.Tensor],
    quantization: Mapping[str, Any] | None,
    copy: bool,
    extra: Mapping[str, str] | None = None,
) -> None:
    """Writes ``folder`` with ``scales`` in place of its own.

    Shards without scales are linked or copied; one that holds some is written again
    without them.

    Args:
        folder: The checkpoint.
        out: A folder that is not there yet.
        scales: Key -> tensor; a shard of their own.
        quantization: quantization_config of config.json; None or empty for none.
        copy: Whether shards are copied rather than linked.
        extra: File name -> text of more files.

    Raises:
        ValueError: If ``out`` is there.
    """
    from safetensors.torch import save_file

    with new_folder(out) as part:
        copy_small_files(folder.path, part)
        weight_map = {}
        for path, keys in folder.keys.items():
            kept = [key for key in keys if not match_scale_key(key)]
            if not kept:
                continue
            weight_map |= dict.fromkeys(kept, path.name)
            if len(kept) == len(keys):
                link_or_copy(path, part / path.name, copy)
            else:
                _write_without(path, part / path.name, kept)
        if scales:
            weight_map |= dict.fromkeys(scales, SHARD)
            save_file(dict(scales), part / SHARD, metadata={"format": "pt"})
            (part / SHARD).chmod(0o644)  # save_file makes it private
        _write_index(folder, part, weight_map)
        config = {k: v for k, v in folder.config.items() if k != "compression_config"}
        config.pop("quantization_config", None)
        if quantization:
            config["quantization_config"] = dict(quantization)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name, text in (extra or {}).items():
            (part / name).write_text(text)


def _write_without(source: Path, target: Path, kept: list[str]) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(source, framework="pt") as shard:
        tensors = {key: shard.get_tensor(key) for key in kept}
        save_file(tensors, target, metadata=shard.metadata() or {"format": "pt"})
    target.chmod(0o644)


def _write_index(folder: Folder, part: Path, weight_map: dict[str, str]) -> None:
    """One index for all shards; its metadata stay, but for the size."""
    consolidated = any(p.name.startswith("consolidated") for p in folder.shards)
    name = f"consolidated{INDEX[5:]}" if consolidated else INDEX
    known = folder.path / name
    metadata = (
        json.loads(known.read_text()).get("metadata", {}) if known.exists() else {}
    )
    size = sum((part / file).stat().st_size for file in set(weight_map.values()))
    content = {
        "metadata": {**metadata, "total_size": size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (part / name).write_text(json.dumps(content, indent=1) + "\n")
