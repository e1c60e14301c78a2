# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Reads the configuration to serve with, or says what is wrong in it."""

from typing import Any

from pydantic import ValidationError

from vllm.fp8_inc.sources.inc.schema import QuantConfig
from vllm.fp8_inc.sources.strict_json import parse_strict_json, read_text
from vllm.fp8_inc.validation import shown
from vllm.logger import init_logger

logger = init_logger(__name__)

_NOT_SERVED = {
    "MEASURE": "calibrates; name the QUANTIZE configuration of the same folder",
    "SHAPE": "records shapes; name the QUANTIZE configuration",
    "NONE": "quantises nothing; unset QUANT_CONFIG",
    "LOAD": "is for a checkpoint that INC saved; unset QUANT_CONFIG, its scales are "
    "read from the checkpoint",
}


def read_config(path: str) -> QuantConfig:
    """Reads and checks the file at ``path`` for serving.

    Raises:
        ValueError: Naming file, key, value and the way out.
    """
    try:
        config = QuantConfig.model_validate(_content(path))
    except ValidationError as error:
        raise ValueError(f"{path}: {_wrong(error)}") from None
    _refuse(path, config)
    _warn(path, config)
    return config


def read_mode(path: str) -> str:
    """Reads only what the file at ``path`` is for: QUANTIZE, MEASURE, ...

    Raises:
        ValueError: If it cannot be read.
    """
    content = _content(path)
    mode = content.get("mode", "QUANTIZE") if isinstance(content, dict) else ""
    return str(mode).upper()


def _content(path: str) -> Any:
    try:
        return parse_strict_json(read_text(path))
    except OSError as error:
        raise ValueError(
            f"QUANT_CONFIG: {path} cannot be read: {error.strerror}. Name the JSON of "
            "the calibration, relative to the folder where the server is started"
        ) from None
    except ValueError as error:
        raise ValueError(f"QUANT_CONFIG: {path} is no JSON: {error}") from None


def _wrong(error: ValidationError) -> str:
    lines = []
    for found in error.errors(include_url=False):
        message = found["msg"].removeprefix("Value error, ")
        key = ".".join(map(str, found["loc"]))
        if found["type"] == "model_type" and not key:
            key = "the file"
        # Without a key the message is about several, and names them.
        lines.append(f"{key} is {shown(found['input'])}: {message}" if key else message)
    return "; ".join(lines)


def _refuse(path: str, config: QuantConfig) -> None:
    if config.mode in _NOT_SERVED:
        raise ValueError(f'{path}: "mode": "{config.mode}" {_NOT_SERVED[config.mode]}')
    if config.fp8_config != "E4M3":
        raise ValueError(
            f'{path}: "fp8_config": "{config.fp8_config}", but the cache is E4M3; '
            "remove the key"
        )
    if config.uses_files and config.observer not in ("maxabs", "maxabs_per_channel"):
        raise ValueError(
            f'{path}: "observer": "{config.observer}" measures no amax, from which '
            'scales could follow; calibrate with "maxabs"'
        )


def _warn(path: str, config: QuantConfig) -> None:
    if unknown := config.unknown_keys():
        logger.warning_once(
            "fp8_inc: %s: INC knows no key %s; without effect", path, ", ".join(unknown)
        )
    backoffs = sorted(key for key in config.scale_params if key.endswith("_backoff"))
    if backoffs:
        logger.warning_once(
            "fp8_inc: %s: scale_params.%s has no effect in INC 3.10, nor here; write "
            "scale_method as an object, with a backoff for activation and weight",
            path,
            ", scale_params.".join(backoffs),
        )
