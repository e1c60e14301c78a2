# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Reads and writes the paged KV caches of CPU backends."""

import torch

from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import StaticScale


def encode_for_cache(
    values: torch.Tensor, scale: StaticScale | None, fmt: Fp8Format
) -> torch.Tensor:
    """Turns activations into what is stored: FP8 codes (uint8), or themselves.

    Args:
        values: [..., heads, size] where the scale is per head.
        scale: None for a cache that is not quantised.
        fmt: The flavour of the device.
    """
    if scale is None:
        return values
    return fmt.cast(values, scale.of_heads(scale.quant_scale))


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


def valid_slots(slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens that are written, and where; padding has slot -1."""
    slots = slot_mapping.flatten().long()
    tokens = torch.nonzero(slots >= 0).flatten()
    return tokens, slots[tokens]
