# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the paged KV caches of CPU backends hold, as torch sees it."""

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
