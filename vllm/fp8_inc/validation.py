# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What pydantic found wrong, in the form of our own errors."""

from pydantic import ValidationError


def wrong_entries(error: ValidationError, whole: str) -> str:
    """Names key, value and what is expected of each wrong entry, in one line.

    Args:
        error: Of ``model_validate``.
        whole: What to call the document itself, where it is no object.
    """
    return "; ".join(
        f"{'.'.join(map(str, entry['loc'])) or whole} is {entry['input']!r} "
        f"({entry['msg']})"
        for entry in error.errors()
    )
