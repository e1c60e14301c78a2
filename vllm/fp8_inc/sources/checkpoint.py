# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The names under which checkpoints keep KV and attention scales."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Role = Literal["q", "k", "v"]

# compressed-tensors (llm-compressor) and AutoFP8: dequant scales beside the
# projections of their attention module.
_SCALE = re.compile(
    r"(?:^|.*\.)(?P<layer>layers\.\d+\.self_attn)\.(?P<role>[qkv])_scale"
)
_LAYER = re.compile(r"(?:^|.*\.)(?P<layer>layers\.\d+\.self_attn)\.attn")


@dataclass(frozen=True)
class ScaleKey:
    """What a checkpoint key says.

    Attributes:
        layer: ``layers.N.self_attn``, without the prefix, which differs
            between a checkpoint and the model that loads it.
        role: What the scale dequantises.
    """

    layer: str
    role: Role


def match_scale_key(key: str) -> ScaleKey | None:
    """Returns what ``key`` names, or None where it is no attention scale."""
    found = _SCALE.fullmatch(key)
    return ScaleKey(found["layer"], found["role"]) if found else None


def layer_of(layer_name: str) -> str | None:
    """Returns the ``ScaleKey.layer`` of an attention layer of a vLLM model."""
    found = _LAYER.fullmatch(layer_name)
    return found["layer"] if found else None


def layer_index(layer: str) -> int:
    """Returns N of ``layers.N.self_attn``."""
    return int(layer.split(".")[1])


def declared_scheme(quantization_config: Mapping[str, Any] | None) -> bool:
    """Tells whether config.json declares static FP8 KV scales, and checks how.

    Raises:
        ValueError: Naming the entry of kv_cache_scheme that is not supported.
    """
    scheme = (quantization_config or {}).get("kv_cache_scheme")
    if scheme is None:
        return False
    if not isinstance(scheme, Mapping):
        raise ValueError(
            f"config.json: quantization_config.kv_cache_scheme is {scheme!r}, but an "
            "object with num_bits, type and strategy is expected"
        )
    supported = {
        "num_bits": (8,),
        "type": ("float",),
        "strategy": ("tensor",),
        "dynamic": (False, None),
        "symmetric": (True, None),
    }
    for name, allowed in supported.items():
        value = scheme.get(name)
        if value not in allowed:
            raise ValueError(
                f"config.json: quantization_config.kv_cache_scheme.{name} is "
                f"{value!r}; --kv-cache-dtype fp8_inc loads {allowed[0]!r}. Serve "
                "with --kv-cache-dtype auto, or quantise the cache again"
            )
    return True


def file_of(key: str, model: str) -> str:
    """Names the file that holds ``key``, for an error message.

    Args:
        key: Name of a tensor.
        model: A folder with safetensors files, or a name on a hub.
    """
    from safetensors import safe_open

    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            if key in shard.keys():  # noqa: SIM118 (a shard is no dict)
                return str(path)
    return f"checkpoint {model}"
