# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Counts the bytes that operators read and write, each for itself: nothing fused.

    with ByteCounter() as counter:
        decode(query, cache, ...)
    print(counter.total)

Views cost nothing; a tensor that is read through a view counts with the elements of
the view, and an expanded dimension once. A gather reads what it returns. torch.matmul
is one operator, as on the device: on CPU it would copy the batches it broadcasts.
"""

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# (self, ..., index): of self only what is picked is read.
_GATHERS = {aten.index_select, aten.index, aten.embedding, aten.gather}
# (self, dim, index, source): of self only what comes from source is written.
_SCATTERS = {aten.index_copy_, aten.index_copy, aten.scatter_, aten.index_put_}
_UNTOUCHED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the elements, without repetitions along expanded dimensions."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


class ByteCounter(TorchDispatchMode):
    """Counts while it is active.

    Attributes:
        read: Bytes read by each operator's overload packet, by name.
        written: Bytes written, likewise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._products = _WholeProducts(self)
        self._paused = False

    def __enter__(self) -> "ByteCounter":
        self._products.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._products.__exit__(*exception)

    @property
    def total(self) -> int:
        """Bytes read and written by all operators."""
        return self.read.total() + self.written.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._paused:
            return out
        operator = func.overloadpacket
        inputs = _tensors((args, kwargs))
        outputs = _tensors(out)
        if operator in _UNTOUCHED or _is_view(func, inputs, outputs):
            return out
        read = sum(map(tensor_bytes, inputs))
        written = sum(map(tensor_bytes, outputs))
        if operator in _GATHERS:
            read = written + sum(map(tensor_bytes, inputs[1:]))
        elif operator in _SCATTERS:
            read = sum(map(tensor_bytes, inputs[1:]))
            written = tensor_bytes(inputs[-1])
        self._add(str(operator), read, written)
        return out

    def _add(self, name: str, read: int, written: int) -> None:
        self.read[name] += read
        self.written[name] += written

    def whole(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs a function and counts it as one operator."""
        self._paused = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._paused = False
        read = sum(map(tensor_bytes, _tensors((args, kwargs))))
        self._add(func.__name__, read, tensor_bytes(out))
        return out


class _WholeProducts(TorchFunctionMode):
    """Sees torch.matmul before it is taken apart."""

    def __init__(self, counter: ByteCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (torch.matmul, torch.Tensor.matmul):
            return self.counter.whole(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_view(func: Any, inputs: list, outputs: list) -> bool:
    """Whether the outputs are but other names of the inputs."""
    if func.is_view:
        return True
    if func._schema.is_mutable or not outputs:
        return False
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in storages for tensor in outputs)
