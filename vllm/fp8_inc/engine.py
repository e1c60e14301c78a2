# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Engines for the commands of ``vllm kv-scales``."""

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

_ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


@contextlib.contextmanager
def engine(model: str, **options: Any) -> Iterator[Any]:
    """Starts an LLM in this process, where it is one worker; ends it afterwards.

    Args:
        model: Folder of the checkpoint.
        options: As ``vllm.LLM`` takes them. Unless told otherwise: eager, seed 0, no
            prefix cache (a token that it serves would not be seen), and a cache that
            is not quantised.
    """
    before = os.environ.get(_ONE_PROCESS)
    os.environ[_ONE_PROCESS] = "0"
    import torch

    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    dtype = torch.get_default_dtype()
    options = {
        "enforce_eager": True,
        "seed": 0,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "auto",
    } | options
    llm = None
    try:
        llm = LLM(model, **options)
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        torch.set_default_dtype(dtype)  # a start that fails leaves the model's
        if before is None:
            del os.environ[_ONE_PROCESS]
        else:
            os.environ[_ONE_PROCESS] = before
