# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What pydantic found wrong, in the form of our own errors."""

import reprlib
from typing import Any

from pydantic import ValidationError

# The ends of what is long, and a few levels of what is deep.
_REPR = reprlib.Repr()  # its arguments came with Python 3.12
_REPR.maxlevel = 4
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = 8
_REPR.maxstring = _REPR.maxother = 200
_MOST = 10  # entries that are named


def shown(value: Any) -> str:
    """``repr(value)``, cut short where it is long or deep."""
    return _REPR.repr(value)


def wrong_entries(error: ValidationError, whole: str) -> str:
    """Names key, value and what is expected of each wrong entry, in one line.

    Args:
        error: Of ``model_validate``.
        whole: What to call the document itself, where it is no object.
    """
    entries = error.errors(include_url=False)
    lines = [
        f"{'.'.join(map(str, entry['loc'])) or whole} is {shown(entry['input'])} "
        f"({entry['msg']})"
        for entry in entries[:_MOST]
    ]
    if len(entries) > _MOST:
        lines.append(f"and {len(entries) - _MOST} more")
    return "; ".join(lines)
