# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a path holds that a user names as a source of scales."""

from pathlib import Path
from typing import Any

from vllm.fp8_inc.report import UsageError
from vllm.fp8_inc.sources.strict_json import parse_strict_json, read_text


def kind_of(source: str) -> str:
    """Returns checkpoint, inc or legacy.

    Raises:
        UsageError: If ``source`` is none of them.
        ValueError: If it is a file and no JSON.
    """
    path = Path(source)
    if (path / "config.json").is_file():
        return "checkpoint"
    if path.is_dir() and any(path.rglob("*_hooks_*.json")):
        return "inc"
    if not path.is_file():
        raise UsageError(
            f"{source} is no local folder with a config.json or with files of INC, and "
            "no JSON; `hf download` fetches a checkpoint from the hub"
        )
    try:
        content = parse_strict_json(read_text(path))
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{source} is no JSON: {error}") from None
    return "legacy" if isinstance(content, dict) and "kv_cache" in content else "inc"


def inc_config(source: str) -> str:
    """The quant-config to serve with: ``source`` itself, or the one in that folder.

    Raises:
        UsageError: If there is not exactly one.
    """
    path = Path(source)
    if path.is_file():
        return source
    found = [file for file in sorted(path.glob("*.json")) if _quantises(file)]
    if len(found) == 1:
        return str(found[0])
    names = [file.name for file in found]
    raise UsageError(
        f"{source} has {len(found)} quant-configs with mode QUANTIZE {names}; name the "
        "JSON"
    )


def _quantises(path: Path) -> bool:
    try:
        content: Any = parse_strict_json(read_text(path))
    except (OSError, ValueError):
        return False
    if not isinstance(content, dict) or "dump_stats_path" not in content:
        return False
    return str(content.get("mode", "QUANTIZE")).upper() == "QUANTIZE"
