# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The JSON that vLLM's --quantization-param-path read, and SGLang's still does.

``{"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
"scaling_factor": {"0": {"0": 0.0123, ...}}}}``: rank -> layer -> one dequant scale
for K and V.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    StrictFloat,
    StringConstraints,
    ValidationError,
)

from vllm.fp8_inc.adjustment import FLAVOR_KEY, resolve_adjustment
from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import check_dequant_scale
from vllm.fp8_inc.sources.external import ExternalScales
from vllm.fp8_inc.sources.store import FoundScale
from vllm.fp8_inc.sources.strict_json import parse_strict_json, read_text
from vllm.fp8_inc.validation import wrong_entries

_OPTION = '"legacy_scales" of --additional-config'
_KEY = "kv_cache.scaling_factor.*.{}"
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


def read_legacy_scales(
    path: str,
    model_type: str | None,
    rank: int,
    world_size: int,
    served_on: Fp8Format,
    environ: Mapping[str, str] = os.environ,
) -> ExternalScales:
    """Reads the scales of one tensor-parallel rank.

    A file made for another world size serves every rank with the elementwise
    maximum: it covers whatever heads the rank holds.

    Args:
        path: The JSON file.
        model_type: Of the model's config.json; compared where the file has one.
        rank: Tensor-parallel rank of this worker.
        world_size: Number of tensor-parallel ranks.
        served_on: The format of the device.
        environ: Where VLLM_SCALE_ADJUSTMENT is looked for.

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
        values, whose = ranks[rank], f"rank {rank} of {world_size}"
    else:
        first = ranks[min(ranks)]
        values = {n: max(layers[n] for layers in ranks.values()) for n in first}
        whose = f"the largest of ranks {sorted(ranks)}, served on {world_size}"
    scales = {n: FoundScale(_KEY.format(n), value) for n, value in values.items()}
    return ExternalScales(
        option="legacy_scales",
        path=path,
        source=f"{path} ({whose})",
        key_of=_KEY,
        found={f"layers.{n}": {"k": s, "v": s} for n, s in scales.items()},
        adjustment=resolve_adjustment({FLAVOR_KEY: cache.dtype}, served_on, environ),
    )


def _read(path: str, model_type: str | None) -> _Document:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{_OPTION}: {path} cannot be read: {error}") from None
    try:
        document = _Document.model_validate(parse_strict_json(text))
    except ValidationError as error:
        raise ValueError(
            f"{path}: {wrong_entries(error, 'the file')}. Expected is "
            "{model_type, kv_cache: {dtype, scaling_factor: {rank: {layer: scale}}}}"
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
