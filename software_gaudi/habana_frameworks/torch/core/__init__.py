# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Lazy mode's switches; nothing is deferred here, so they only count."""

from typing import Any

mark_steps = 0


def mark_step(*args: Any, **kwargs: Any) -> None:
    """Counts; on the device it runs what lazy mode has gathered."""
    global mark_steps
    mark_steps += 1


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


hpu_set_env = hpu_set_inference_env = hpu_inference_set_env = _nothing
hpu_reset_env = hpu_teardown_inference_env = _nothing
hpu_initialize = hpu_inference_initialize = _nothing
