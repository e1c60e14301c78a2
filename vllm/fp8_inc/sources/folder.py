# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A checkpoint's folder, of which only config.json and headers are read."""

import contextlib
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
from vllm.fp8_inc.sources.strict_json import parse_json, read_text
from vllm.fp8_inc.validation import shown

INDEX = "model.safetensors.index.json"
# Architectures with a latent that vLLM nevertheless serves with expanded K and V.
_EXPANDED = ("minicpm3",)
_NUMBER_OF_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MOST_LAYERS = 10_000
# Whole numbers, where they are there; the last two may be 0, for no MLA.
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")
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
            ValueError: Where there is none, it is no JSON object, or its sizes are
                none.
        """
        file = Path(path) / "config.json"
        try:
            config = parse_json(read_text(file))
        except OSError as error:
            raise ValueError(
                f"{file} cannot be read ({error.strerror}). Name the local folder of "
                "a checkpoint; `hf download` fetches one from the hub"
            ) from None
        except ValueError as error:
            raise ValueError(f"{file} is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{file}: an object is expected")
        folder = cls(Path(path), config)
        folder._check_sizes()
        return folder

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The part of config.json that has the number of layers.

        Raises:
            ValueError: Where none has.
        """
        nested = _parts(self.config)
        for config in (self.config, *nested, *(d for c in nested for d in _parts(c))):
            for name in _NUMBER_OF_LAYERS:
                if name in config:
                    return {**config, "num_hidden_layers": config[name]}
        raise ValueError(
            f"{self.path}/config.json has no num_hidden_layers: is it of another "
            "kind of model, or cut short? Copy or download it again"
        )

    def _check_sizes(self) -> None:
        layers = "num_hidden_layers"
        for name in (layers, *_SIZES, *_LATENT):
            value = self.text_config.get(name)
            most = _MOST_LAYERS if name == layers else 2**31
            if value is None and name != layers:
                continue
            least = 0 if name in _LATENT else 1
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"{self.path}/config.json: {name} is {shown(value)}, but a whole "
                    f"number from {least} to {most} is expected. Copy or download it "
                    "again"
                )

    def size(self, name: str) -> int:
        """A number of the part of config.json that has the number of layers.

        Raises:
            ValueError: Where it has none of this name.
        """
        value = self.text_config.get(name)
        if value is None:
            raise ValueError(
                f"{self.path}/config.json has no {name}: is it cut short? Copy or "
                "download it again"
            )
        return value

    @property
    def quantization(self) -> dict[str, Any]:
        """quantization_config, or what old compressed-tensors called it."""
        for name in ("quantization_config", "compression_config"):
            found = self.config.get(name)
            if found and not isinstance(found, dict):
                raise ValueError(
                    f"{self.path}/config.json: {name} is {shown(found)}, but an object "
                    "is expected. Copy or download it again"
                )
            if found:
                return found
        return {}

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
            raise ValueError(
                f"{index} names {sorted(missing)}, not in {self.path}: copy or "
                "download them again"
            )
        return [file for file in files if file.name in named]

    @staticmethod
    def weight_map(index: Path) -> dict[str, str]:
        """Tensor name -> file name.

        Raises:
            ValueError: Where ``index`` is no such index.
        """
        try:
            content = parse_json(read_text(index))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{index} cannot be read ({error}): copy or download it again"
            ) from None
        names = content.get("weight_map") if isinstance(content, dict) else None
        files = names.values() if isinstance(names, dict) else [None]
        if not all(isinstance(file, str) for file in files):
            raise ValueError(
                f"{index} is no index of safetensors, an object whose weight_map has a "
                "file name for each tensor: copy or download it again"
            )
        return names

    @cached_property
    def keys(self) -> dict[Path, list[str]]:
        """The tensor names of each shard."""
        return {path: list(keys) for path, keys in self._headers()}

    def _headers(self) -> Iterator[tuple[Path, list[str]]]:
        for path in self.shards:
            with opened(path) as shard:
                yield path, list(shard.keys())

    @cached_property
    def scale_tensors(self) -> list[tuple[Path, str, torch.Tensor]]:
        """File, name and content of every scale, and of what goes with scales."""
        found = []
        for path, keys in self.keys.items():
            names = [key for key in keys if match_scale_key(key)]
            if not names:
                continue
            with opened(path) as shard:
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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a shard.

    Raises:
        ValueError: Naming the file, where it or a tensor in it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): copy or download it again"
        ) from None


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configurations inside another one, those of towers left out."""
    return [
        part
        for name, part in config.items()
        if isinstance(part, dict) and not any(tower in name for tower in _TOWERS)
    ]
