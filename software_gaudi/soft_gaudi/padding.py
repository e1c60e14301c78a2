# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the device allows and the CPU refuses: padded indices, FP8 in index_copy_.

Padded rows of the worker carry index -1 (slots, blocks, groups) or stale token ids.
The device reads or writes some row; CPU kernels raise. That -1 means the last row,
which is padding, is a guess at the device's behaviour.
"""

import functools
from typing import Any

import torch
from torch import Tensor

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _wrap(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index)


def install() -> None:
    """Widens the methods of Tensor that the worker uses with padded indices."""
    _install_methods()
    _install_embedding()
    _install_one_hot()


def _install_methods() -> None:
    copy, select, reduce = (
        Tensor.index_copy_,
        Tensor.index_select,
        Tensor.index_reduce_,
    )

    @functools.wraps(copy)
    def index_copy_(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        index = _wrap(index, self.shape[dim])
        if self.dtype not in _FP8:
            return copy(self, dim, index, source)
        copy(self.view(torch.uint8), dim, index, source.view(torch.uint8))
        return self

    @functools.wraps(select)
    def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
        return select(self, dim, _wrap(index, self.shape[dim]))

    @functools.wraps(reduce)
    def index_reduce_(
        self: Tensor, dim: int, index: Tensor, source: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        return reduce(self, dim, _wrap(index, self.shape[dim]), source, *args, **kwargs)

    Tensor.index_copy_ = index_copy_
    Tensor.index_select = index_select
    Tensor.index_reduce_ = index_reduce_


def _install_embedding() -> None:
    embed = torch.embedding

    @functools.wraps(embed)
    def embedding(weight: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return embed(weight, index.clamp(0, weight.shape[0] - 1), *args, **kwargs)

    torch.embedding = embedding


def _install_one_hot() -> None:
    one_hot_of = torch.nn.functional.one_hot

    @functools.wraps(one_hot_of)
    def one_hot(index: Tensor, num_classes: int = -1) -> Tensor:
        """Rows of zeros for indices out of range."""
        if num_classes < 0:
            return one_hot_of(index, num_classes)
        classes = torch.arange(num_classes, device=index.device)
        return (index.unsqueeze(-1) == classes).to(torch.int64)

    torch.nn.functional.one_hot = one_hot
