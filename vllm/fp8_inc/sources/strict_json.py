# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""JSON in which no key may be there twice, for files that hold scales."""

import json
from collections.abc import Iterable
from typing import Any


def parse_strict_json(text: str) -> Any:
    """Parses ``text``.

    Raises:
        ValueError: For what is no JSON, or an object with the same key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError(f"nested too deeply ({error})") from None


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(
                f"key {key!r} is there twice ({result[key]!r} and {value!r})"
            )
        result[key] = value
    return result
