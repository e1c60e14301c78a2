# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Engines for the commands of ``vllm kv-scales``."""

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

_ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
# Eager, and no prefix cache: a token that it serves would not be seen.
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "seed": 0,
    "enable_prefix_caching": False,
    "kv_cache_dtype": "auto",
}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Engines started inside run in this process and leave nothing behind."""
    import torch

    from vllm.distributed import cleanup_dist_env_and_memory

    before, dtype = os.environ.get(_ONE_PROCESS), torch.get_default_dtype()
    os.environ[_ONE_PROCESS] = "0"
    try:
        yield
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()
        torch.set_default_dtype(dtype)  # a start that fails leaves the model's
        if before is None:
            del os.environ[_ONE_PROCESS]
        else:
            os.environ[_ONE_PROCESS] = before


@contextlib.contextmanager
def engine(model: str, **options: Any) -> Iterator[Any]:
    """Starts an LLM.

    Args:
        model: Folder of the checkpoint.
        options: As ``vllm.LLM`` takes them, over ``OPTIONS``.
    """
    from vllm import LLM

    with alone():
        llm = None
        try:
            llm = LLM(model, **{**OPTIONS, **options})
            yield llm
        finally:
            del llm
