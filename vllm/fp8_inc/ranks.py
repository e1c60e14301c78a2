# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The tensor-parallel rank of this process."""


def tensor_parallel() -> tuple[int, int]:
    """Returns rank and number of ranks; (0, 1) in a process that serves nothing."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        model_parallel_is_initialized,
    )

    if not model_parallel_is_initialized():
        return 0, 1
    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
