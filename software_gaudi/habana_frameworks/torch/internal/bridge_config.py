# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Settings of the bridge."""

import contextlib
from collections.abc import Iterator
from typing import Any


def get_pt_compile_only_mode() -> bool:
    """Whether warm-up compiles without running; it runs here."""
    return False


@contextlib.contextmanager
def env_setting(name: str, value: Any) -> Iterator[None]:
    """A setting for the length of the context; none has an effect here."""
    yield
