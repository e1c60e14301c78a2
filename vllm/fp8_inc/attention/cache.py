# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the paged KV caches of CPU backends hold, as torch sees it."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import StaticScale


def decode_from_cache(
    stored: torch.Tensor, scale: StaticScale | None, fmt: Fp8Format
) -> torch.Tensor:
    """Turns what is stored back into float32 values."""
    if scale is None:
        return stored.float()
    return fmt.decode(stored) * scale.of_heads(scale.dequant_scale)


def storage(cache: torch.Tensor) -> torch.Tensor:
    """A view that can be indexed: FP8 as uint8, which scatters where FP8 cannot."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


T = TypeVar("T")


class MadeFor(Generic[T]):
    """What is made once for a cache and its scales.

    A cache is allocated after the layers, and again after a sleep; scales are other
    objects after a weight reload.

    Args:
        make: Takes the cache as it can be indexed.
    """

    def __init__(self, make: Callable[[torch.Tensor], T]) -> None:
        self._make = make
        self._address = 0
        self._scales: object = None
        self._made: T | None = None

    def __call__(self, cache: torch.Tensor, scales: object) -> T:
        """What was made for these, or makes it."""
        address = cache.data_ptr()
        if address != self._address or scales is not self._scales or not self._made:
            self._made = self._make(storage(cache))
            self._address, self._scales = address, scales
        return self._made
