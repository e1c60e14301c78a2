# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What can be known to be wrong before a weight is loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm.fp8_inc.adjustment import resolve_adjustment
from vllm.fp8_inc.sources.checkpoint import declared_scheme
from vllm.fp8_inc.sources.folder import Folder

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.fp8_inc.scale_loader import ScaleLoader

# Load formats that read every *.safetensors of a folder or of its index.
_SHARDS = ("auto", "hf", "safetensors")


def check_configuration(vllm_config: "VllmConfig", quant_config: str | None) -> None:
    """Checks the options, config.json and the headers of the shards.

    It runs where vLLM's configuration is completed, before a process is started.

    Args:
        vllm_config: Of an engine with an fp8_inc cache.
        quant_config: QUANT_CONFIG, whose scales replace the checkpoint's.

    Raises:
        ValueError: Naming option or file, key, value and the way out.
    """
    from vllm.fp8_inc.scale_loader import legacy_scales, quantization_config
    from vllm.fp8_inc.settings import Settings

    settings, model_config = Settings.of(vllm_config), vllm_config.model_config
    quantization = quantization_config(model_config)
    declared_scheme(quantization)
    size = vllm_config.parallel_config.tensor_parallel_size
    if not (quant_config or legacy_scales(settings, model_config, 0, size)):
        resolve_adjustment(quantization, settings.format)
    if folder := shards_of(model_config, vllm_config.load_config):
        _ = folder.keys  # reads index and headers


def check_scales(
    loader: "ScaleLoader", model_config: "ModelConfig", load_config: "LoadConfig"
) -> None:
    """Gives a loader the scales of a local checkpoint, before its weights.

    Raises:
        ValueError: As the loading itself would.
    """
    if folder := shards_of(model_config, load_config):
        loader.preview(_scales(folder))


def _scales(folder: Folder) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, tensor) for _, key, tensor in folder.scale_tensors)


def shards_of(model_config: "ModelConfig", load_config: "LoadConfig") -> Folder | None:
    """The folder of a checkpoint whose safetensors vLLM is going to load.

    None where that is not what Folder.shards says: "auto" alone prefers Mistral's
    consolidated files.
    """
    path, format_ = Path(model_config.model), load_config.load_format
    if format_ not in _SHARDS or not any(path.glob("*.safetensors")):
        return None
    if format_ != "auto" and any(path.glob("consolidated*.safetensors")):
        return None
    return Folder(path, {})
