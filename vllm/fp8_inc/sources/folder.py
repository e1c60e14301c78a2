# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A checkpoint's folder, of which only config.json and headers are read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vllm.fp8_inc.sources.checkpoint import (
    attention_module_of,
    layer_index,
    match_scale_key,
)

INDEX = "model.safetensors.index.json"
# Architectures with a latent that vLLM nevertheless serves with expanded K and V.
_EXPANDED = ("minicpm3",)
_NUMBER_OF_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TOWERS = ("vision", "visual", "audio", "speech", "encoder")


@dataclass(frozen=True)
class Folder:
    """A local checkpoint.

    Attributes:
        path: The folder.
        config: config.json.
    """

    path: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> "Folder":
        """Reads config.json.

        Raises:
            ValueError: Where there is none, or it is no JSON object.
        """
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_text())
        except OSError as error:
            raise ValueError(
                f"{file} cannot be read ({error.strerror}). Name the local folder of "
                "a checkpoint; `hf download` fetches one from the hub"
            ) from None
        except ValueError as error:
            raise ValueError(f"{file} is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{file}: an object is expected")
        return cls(Path(path), config)

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The part of config.json that has the number of layers.

        Raises:
            ValueError: Where none has.
        """
        nested = _parts(self.config)
        for config in (self.config, *nested, *(d for c in nested for d in _parts(c))):
            for name in _NUMBER_OF_LAYERS:
                if isinstance(config.get(name), int):
                    return {**config, "num_hidden_layers": config[name]}
        raise ValueError(f"{self.path}/config.json has no num_hidden_layers")

    @property
    def quantization(self) -> dict[str, Any]:
        """quantization_config, or what old compressed-tensors called it."""
        found = self.config.get("quantization_config")
        return found or self.config.get("compression_config") or {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations that vLLM chooses for it."""
        text = self.text_config
        name = text.get("dtype") or text.get("torch_dtype")
        name = name or self.config.get("dtype") or self.config.get("torch_dtype")
        return torch.float16 if name == "float16" else torch.bfloat16

    @property
    def is_mla(self) -> bool:
        """Whether one latent is cached for K and V."""
        text = self.text_config
        return bool(text.get("kv_lora_rank")) and text.get("model_type") not in (
            _EXPANDED
        )

    @cached_property
    def shards(self) -> list[Path]:
        """The weight files that vLLM loads, as its default loader chooses them.

        Raises:
            ValueError: Where there is none, or the index names one that is not there.
        """
        files = sorted(self.path.glob("consolidated*.safetensors"))
        index = self.path / (INDEX if not files else f"consolidated{INDEX[5:]}")
        files = files or sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{self.path} has no *.safetensors; other formats hold pickled data, "
                "which is not read. Convert the weights to safetensors"
            )
        if not index.is_file():
            return files
        named = set(self.weight_map(index).values())
        if missing := named - {file.name for file in files}:
            raise ValueError(f"{index} names {sorted(missing)}, not in {self.path}")
        return [file for file in files if file.name in named]

    @staticmethod
    def weight_map(index: Path) -> dict[str, str]:
        """Tensor name -> file name.

        Raises:
            ValueError: Where ``index`` is no such index.
        """
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is no index of safetensors: {error!r}") from None

    @cached_property
    def keys(self) -> dict[Path, list[str]]:
        """The tensor names of each shard."""
        return {path: list(keys) for path, keys in self._headers()}

    def _headers(self) -> Iterator[tuple[Path, list[str]]]:
        from safetensors import SafetensorError, safe_open

        for path in self.shards:
            try:
                with safe_open(path, framework="pt") as shard:
                    yield path, list(shard.keys())
            except SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file: {error}") from None

    @cached_property
    def scale_tensors(self) -> list[tuple[Path, str, torch.Tensor]]:
        """File, name and content of every scale, and of what goes with scales."""
        from safetensors import safe_open

        found = []
        for path, keys in self.keys.items():
            names = [key for key in keys if match_scale_key(key)]
            if not names:
                continue
            with safe_open(path, framework="pt") as shard:
                found += [(path, key, shard.get_tensor(key)) for key in names]
        return found

    @cached_property
    def attention_layers(self) -> list[str]:
        """``layers.N`` of each layer with a KV cache, by its weights."""
        number = self.text_config["num_hidden_layers"]
        layers = {n for n in self._attention_modules if layer_index(n) < number}
        layers = layers or {f"layers.{n}" for n in range(number)}
        return sorted(layers, key=layer_index)

    @cached_property
    def _attention_modules(self) -> dict[str, str]:
        keys = (key for keys in self.keys.values() for key in keys)
        return dict(filter(None, map(attention_module_of, keys)))

    def attention_module(self, layer: str) -> str:
        """The attention module of ``layers.N``, as the checkpoint names it."""
        return self._attention_modules.get(layer, f"model.{layer}.self_attn")


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configurations inside another one, those of towers left out."""
    return [
        part
        for name, part in config.items()
        if isinstance(part, dict) and not any(tower in name for tower in _TOWERS)
    ]
