# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The JSON that vLLM's --quantization-param-path read, and SGLang's still does.

``{"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
"scaling_factor": {"0": {"0": 0.0123, ...}}}}``: rank -> layer -> one dequant scale
for K and V.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    StrictFloat,
    StringConstraints,
    ValidationError,
)

from vllm.fp8_inc.scales import check_dequant_scale
from vllm.fp8_inc.sources.strict_json import parse_strict_json

_OPTION = '"legacy_scales" of --additional-config'
_Index = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,5})$")]


class _KVCache(BaseModel):
    model_config = ConfigDict(extra="forbid")

    dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"]
    scaling_factor: dict[_Index, dict[_Index, StrictFloat]]


class _Document(BaseModel):
    # Another key could be scales of something that would then be dropped.
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_type: str | None = None
    kv_cache: _KVCache


@dataclass(frozen=True)
class LegacyScales:
    """What the file says for one rank.

    Attributes:
        path: The file.
        dtype: The FP8 flavour that it was made for, as fp8_dtype_flavor names it.
        dequant_scales: Layer number -> x = q * s, for K and for V.
        ranks: Which rank's values these are, for the report.
    """

    path: str
    dtype: str
    dequant_scales: dict[int, float]
    ranks: str


def read_legacy_scales(
    path: str, model_type: str | None, rank: int, world_size: int
) -> LegacyScales:
    """Reads the scales of one tensor-parallel rank.

    A file made for another world size serves every rank with the elementwise
    maximum: it covers whatever heads the rank holds.

    Args:
        path: The JSON file.
        model_type: Of the model's config.json; compared where the file has one.
        rank: Tensor-parallel rank of this worker.
        world_size: Number of tensor-parallel ranks.

    Raises:
        ValueError: Naming file, key and value.
    """
    cache = _read(path, model_type).kv_cache
    ranks = {int(r): _numbers(layers) for r, layers in cache.scaling_factor.items()}
    if not ranks or not all(ranks.values()):
        raise ValueError(f"{path}: kv_cache.scaling_factor has no scales")
    for r, layers in ranks.items():
        for layer, value in layers.items():
            try:
                check_dequant_scale(value)
            except ValueError as error:
                raise ValueError(
                    f"{path}: kv_cache.scaling_factor.{r}.{layer} {error}. Calibrate "
                    f"again, or leave out {_OPTION}"
                ) from None
    _check_same_layers(path, ranks)
    if set(ranks) == set(range(world_size)):
        return LegacyScales(
            path, cache.dtype, ranks[rank], f"rank {rank} of {world_size}"
        )
    largest = {
        n: max(layers[n] for layers in ranks.values()) for n in ranks[min(ranks)]
    }
    return LegacyScales(
        path,
        cache.dtype,
        largest,
        f"the largest of ranks {sorted(ranks)}, served on {world_size}",
    )


def _read(path: str, model_type: str | None) -> _Document:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{_OPTION}: {path} cannot be read: {error}") from None
    try:
        document = _Document.model_validate(parse_strict_json(text))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'the file'} is {e['input']!r} "
            f"({e['msg']})"
            for e in error.errors()
        )
        raise ValueError(
            f"{path}: {wrong}. Expected is {{model_type, kv_cache: {{dtype, "
            "scaling_factor: {rank: {layer: scale}}}}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON for {_OPTION}: {error}") from None
    if model_type and document.model_type not in (None, model_type):
        raise ValueError(
            f"{path}: model_type is {document.model_type!r}, but the model is a "
            f"{model_type!r}. Name the file of this model in {_OPTION}"
        )
    return document


def _numbers(layers: dict[str, float]) -> dict[int, float]:
    return {int(layer): float(value) for layer, value in layers.items()}


def _check_same_layers(path: str, ranks: dict[int, dict[int, float]]) -> None:
    first = min(ranks)
    for rank, layers in ranks.items():
        if odd := layers.keys() ^ ranks[first].keys():
            raise ValueError(
                f"{path}: kv_cache.scaling_factor: layers {sorted(odd)} are in one of "
                f"ranks {first} and {rank} only; every rank has every layer"
            )
