# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Tensors "on hpu" are host tensors: what serves where there is no C++ compiler.

torch.device("hpu") is a name that PyTorch knows, so only what allocates is needed:
the factories reach the two kernels of the HPU dispatch key, in every thread and under
``with torch.device("hpu")``; what asks for the device before it allocates is wrapped.
A device mix-up cannot show itself: ``tensor.device`` is cpu everywhere.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("aten", "IMPL")


def host(value: Any) -> Any:
    """cpu for the device hpu, in each of its spellings; all else as it is."""
    if isinstance(value, torch.device) and value.type == "hpu":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "hpu":
        return "cpu"
    return value


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def on_host(function: Callable) -> Callable:
    """Wraps a function so that hpu in its arguments becomes cpu."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = host(kwargs["device"])
        return function(*map(host, args), **kwargs)

    return call


def install() -> None:
    """Makes PyTorch allocate on the host for the device hpu."""
    _library.impl("empty.memory_format", _empty, "HPU")
    _library.impl("empty_strided", _empty_strided, "HPU")
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, on_host(getattr(torch, name)))
    torch.Tensor.to = on_host(torch.Tensor.to)
    torch.nn.Module.to = on_host(torch.nn.Module.to)
