# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The backend `hpu_backend` of torch.compile: the traced graph, run as it is."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from soft_gaudi.fold import host

# Number of nodes of every graph that was compiled.
compiled: list[int] = []


def hpu_backend(
    graph: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any
) -> Callable:
    """Counts the graph and returns it."""
    compiled.append(len(graph.graph.nodes))
    return graph.forward


def install() -> None:
    """Registers the backend."""
    from torch._dynamo.backends.registry import register_backend

    register_backend(hpu_backend, name="hpu_backend")


def fold_fake_tensors() -> None:
    """Puts fake tensors on the host, like real ones."""
    dispatch = FakeTensorMode.dispatch

    def dispatch_on_host(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if kwargs and "device" in kwargs:
            kwargs = kwargs | {"device": host(kwargs["device"])}
        return dispatch(self, func, types, args, kwargs)

    FakeTensorMode.dispatch = dispatch_on_host
