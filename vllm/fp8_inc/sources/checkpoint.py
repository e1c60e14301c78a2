# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Finds KV and attention scales among the names of a checkpoint.

The names themselves are data, in ``producers``. Whatever stands before
``layers.N`` does not matter, since it differs between a checkpoint and the model
that loads it; but a vision or an audio tower has layers of its own, whose scales
are nobody's: see ``_TOWER``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.fp8_inc.sources.producers import PRODUCERS, Producer, Role, Tensor, Use

_TENSORS: dict[str, Tensor] = {
    name: tensor for producer in PRODUCERS for name, tensor in producer.tensors.items()
}
# Nearly all of a checkpoint's keys end otherwise: one look-up rules them out.
_LAST_PARTS = frozenset(name.rpartition(".")[2] for name in _TENSORS)

_MODULE = (
    r"(?P<prefix>(?:.*\.)?)(?:layers|h|blocks)\.(?P<index>[0-9]{1,6})\."
    r"(?:mtp_block\.)?(?P<module>self_attn|self_attention|attention|attn|mixer)"
)
# The names of vLLM's own modules, which INC writes.
_INNER = r"\.(?:attn|mla_attn|mla_attn\.mla_attn)"
_NAME = "|".join(map(re.escape, _TENSORS))
_SCALE = re.compile(rf"{_MODULE}(?:{_INNER})?(?:\.impl)?\.(?P<name>{_NAME})")
_LAYER = re.compile(rf"{_MODULE}{_INNER}")
# What has keys and values has one of these, whatever its quantisation adds to it.
_PROJECTION = re.compile(
    rf"{_MODULE}\.(?:(?:self|attention)\.)?(?:k_proj|qkv_proj|kv_proj|kv_b_proj|"
    r"query_key_value|c_attn|wk|wkv_b|wqkv|Wqkv|W_pack)\.[a-z_]*weight[a-z_]*"
)
# A part of the prefix that begins with one of these words, or ends in "encoder".
_TOWER = re.compile(
    r"(?:^|\.)(?:(?:vision|visual|vit|image|audio|speech|multi_modal|mm_)[^.]*"
    r"|[^.]*encoder)\."
)


@dataclass(frozen=True)
class ScaleKey:
    """What a checkpoint key says.

    Attributes:
        layer: ``layers.N``, without what stands before and after it, or
            ``mtp.layers.N``: a draft model that is numbered from 0.
        name: What follows the attention module; a name of ``producers``.
        tower: Whether a vision or an audio tower is meant, not the model.
    """

    layer: str
    name: str
    tower: bool = False

    @property
    def roles(self) -> tuple[Role, ...]:
        """What the tensor scales."""
        return _TENSORS[self.name].roles

    @property
    def use(self) -> Use:
        """Direction of the scale, or why it is none."""
        return _TENSORS[self.name].use


def match_scale_key(key: str) -> ScaleKey | None:
    """Returns what ``key`` names, or None where it is no attention scale."""
    if key.rpartition(".")[2] not in _LAST_PARTS:
        return None
    found = _SCALE.fullmatch(key)
    if found is None:
        return None
    tower = _TOWER.search(found["prefix"]) is not None
    return ScaleKey(_layer(found), found["name"], tower)


def layer_of(layer_name: str) -> str | None:
    """Returns the ``ScaleKey.layer`` of an attention layer of a vLLM model."""
    found = _LAYER.fullmatch(layer_name)
    if found is None or _TOWER.search(found["prefix"]):
        return None
    return _layer(found)


def _layer(found: re.Match[str]) -> str:
    draft = "mtp." if found["prefix"].endswith("mtp.") else ""
    return f"{draft}layers.{int(found['index'])}"


def is_numbered_draft(layer: str) -> bool:
    """Whether ``layer`` is of a draft model that is numbered from 0."""
    return layer.startswith("mtp.")


def attention_module_of(key: str) -> tuple[str, str] | None:
    """Returns layer and module of a weight that makes keys.

    ``model.layers.3.self_attn.k_proj.weight`` is of ``layers.3`` and
    ``model.layers.3.self_attn``; other weights are of None.
    """
    found = _PROJECTION.fullmatch(key)
    if found is None or _TOWER.search(found["prefix"]):
        return None
    return f"layers.{int(found['index'])}", key[: found.end("module")]


def layer_index(layer: str) -> int:
    """Returns N of ``layers.N``."""
    return int(layer.rpartition(".")[2])


def key_in_layer(key: str, layer: str) -> str:
    """Returns the name that the scale ``key`` would have in another layer."""
    found = _SCALE.fullmatch(key)
    if found is None:
        raise ValueError(f"{key} is no attention scale")
    start, end = found.span("index")
    return f"{key[:start]}{layer_index(layer)}{key[end:]}"


def producers_of(
    keys: Iterable[str], quantization_config: Mapping[str, Any] | None
) -> str:
    """Says who wrote the scales ``keys``, for the report.

    Those whose row has every name; of these the ones that call the attention module
    so; of these the ones that config.json speaks of; of these the ones with the
    fewest names of their own.
    """
    matches = [found for key in keys if (found := _SCALE.fullmatch(key))]
    names = {found["name"] for found in matches}
    modules = {found["module"] for found in matches}
    rows = [row for row in PRODUCERS if names <= row.tensors.keys()]
    if not rows:
        rows = [row for row in PRODUCERS if names & row.tensors.keys()]
        return " and ".join(row.name for row in rows)
    config = quantization_config or {}
    for wanted in (
        [row for row in rows if modules <= set(row.module.split("."))],
        [row for row in rows if _announced(row, config)],
    ):
        rows = [row for row in rows if row in wanted] or rows
    fewest = min(len(row.tensors) for row in rows)
    return " or ".join(row.name for row in rows if len(row.tensors) == fewest)


def _announced(row: Producer, config: Mapping[str, Any]) -> bool:
    return (
        config.get("quant_method") in row.quant_methods
        and config.get("provider") == row.provider
    )


def declared_scheme(quantization_config: Mapping[str, Any] | None) -> bool:
    """Tells whether config.json declares static FP8 KV scales, and checks how.

    Raises:
        ValueError: Naming the entry of kv_cache_scheme, or the kv_cache_quant_algo,
            that is not supported.
    """
    config = quantization_config or {}
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        return _declared_by_modelopt(config) or _declared_by_quark(config)
    if not isinstance(scheme, Mapping):
        raise ValueError(
            f"config.json: quantization_config.kv_cache_scheme is {scheme!r}, but an "
            "object with num_bits, type and strategy is expected"
        )
    supported = {
        "num_bits": (8,),
        "type": ("float",),
        "strategy": ("tensor", "attn_head"),
        "dynamic": (False, None),
        "symmetric": (True, None),
    }
    for name, allowed in supported.items():
        value = scheme.get(name)
        if value not in allowed:
            raise ValueError(
                f"config.json: quantization_config.kv_cache_scheme.{name} is "
                f"{value!r}; --kv-cache-dtype fp8_inc loads {_either(allowed)}. Serve "
                "with --kv-cache-dtype auto, or quantise the cache again"
            )
    return True


def _either(allowed: tuple[object, ...]) -> str:
    return " or ".join(repr(value) for value in allowed if value is not None)


def _declared_by_modelopt(config: Mapping[str, Any]) -> bool:
    inner = config.get("quantization")
    inner = inner if isinstance(inner, Mapping) else {}
    name = "kv_cache_quant_algo"
    algorithm = config.get(name, inner.get(name))
    if algorithm is None:
        return False
    if isinstance(algorithm, str) and algorithm.upper() == "FP8":
        return True
    raise ValueError(
        f"config.json: quantization_config.{name} is {algorithm!r}; --kv-cache-dtype "
        "fp8_inc loads 'FP8'. Serve with --kv-cache-dtype auto, or quantise the "
        "cache again"
    )


def _declared_by_quark(config: Mapping[str, Any]) -> bool:
    export = config.get("export")
    return isinstance(export, Mapping) and bool(export.get("kv_cache_group"))


def files_of(key: str, model: str) -> list[str]:
    """Names the files of the folder ``model`` that hold the tensor ``key``."""
    from safetensors import safe_open

    files = []
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            if key in shard.keys():  # noqa: SIM118 (a shard is no dict)
                files.append(str(path))
    return files


def file_of(key: str, model: str) -> str:
    """Names the file that holds ``key``, for an error message.

    Args:
        key: Name of a tensor.
        model: A folder with safetensors files, or a name on a hub.
    """
    return next(iter(files_of(key, model)), f"checkpoint {model}")
