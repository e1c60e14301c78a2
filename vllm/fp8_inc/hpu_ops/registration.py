# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Defines torch.ops.hpu.* where Intel's bridge does not."""

from collections.abc import Callable

import torch

from vllm.fp8_inc.hpu_ops import casts, gemm, schemas, sdpa

_NAMESPACE = "hpu"
# For every backend, so that a software device serves as well as CPU.
_KEY = "CompositeExplicitAutograd"
_OPERATORS: list[tuple[dict[str, str], Callable, Callable]] = [
    (schemas.CAST_TO_FP8, casts.cast_to_fp8, casts.cast_to_fp8_shapes),
    (schemas.CAST_FROM_FP8, casts.cast_from_fp8, casts.cast_from_fp8_shapes),
    (schemas.FP8_GEMM, gemm.fp8_gemm, gemm.fp8_gemm_shapes),
    (schemas.SDPA, sdpa.sdpa, sdpa.sdpa_shapes),
    (schemas.FP8_SDPA, sdpa.fp8_sdpa, sdpa.fp8_sdpa_shapes),
]
_library: torch.library.Library | None = None


def is_defined(name: str) -> bool:
    """Whether anybody has defined hpu::``name``."""
    return bool(torch._C._jit_get_schemas_for_operator(f"{_NAMESPACE}::{name}"))


def register() -> bool:
    """Defines the operators in this process, unless the bridge has.

    Returns:
        Whether the operators of this process are the software ones.
    """
    global _library
    if _library is not None:
        return True
    if is_defined("cast_to_fp8_v2"):
        return False
    _library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for overloads, implementation, shapes in _OPERATORS:
        for name, schema in overloads.items():
            define(name, schema, implementation, shapes)
    return True


def define(name: str, schema: str, implementation: Callable, shapes: Callable) -> None:
    """Defines one more software operator, after ``register``.

    Args:
        name: With its overload, for example "fp8_gemm_v2.scalar".
        schema: Arguments and results, from behind the opening parenthesis.
        implementation: Serves every backend.
        shapes: Returns empty results, for torch.compile.
    """
    _library.define(f"{name}({schema}")
    _library.impl(name, implementation, _KEY)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_library)
