# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""JSON in which no key may be there twice, for files that hold scales.

Every JSON that a user names is read here: only a regular file of a sane size, so that
a pipe or a device hangs nothing and a wrong file fills no memory.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm.fp8_inc.validation import shown

_LARGEST = 64 << 20  # bytes; the index of a checkpoint of 100,000 tensors has 10 MB


def read_text(path: str | Path, largest: int = _LARGEST) -> str:
    """Reads a text file of at most ``largest`` bytes.

    Raises:
        OSError: If it cannot be read, is no regular file, or is larger.
        ValueError: If it is not UTF-8.
    """
    info = os.stat(path)
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if info.st_size > largest:
        size = f"it has {info.st_size:,} bytes, of which no more than {largest:,}"
        raise OSError(errno.EFBIG, f"{size} are read", str(path))
    return Path(path).read_text(encoding="utf-8")


def parse_strict_json(text: str) -> Any:
    """Parses ``text``.

    Raises:
        ValueError: For what is no JSON, or an object with the same key twice.
    """
    return parse_json(text, _without_duplicates)


def parse_json(text: str, pairs: Callable[[Any], Any] | None = None) -> Any:
    """Parses ``text``; ``pairs`` makes an object of its keys and values.

    Raises:
        ValueError: For what is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(f"nested too deeply ({error})") from None


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(
                f"key {shown(key)} is there twice ({shown(result[key])} and "
                f"{shown(value)})"
            )
        result[key] = value
    return result
