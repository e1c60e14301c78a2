# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The FP8 KV cache of the HPU worker: writes, and the three ways of reading.

Stands where the worker has VLLMFP8KVCache, with the same call signatures.
"""

import torch
from torch import nn

from vllm.fp8_inc.attention.cache import storage
from vllm.fp8_inc.attention.hpu_scales import DeviceScale


class Fp8KVCache(nn.Module):
    """K, V or the latent of one layer.

    Args:
        use_contiguous_pa: Whether decode finds its blocks in order at the start of
            the cache (VLLM_CONTIGUOUS_PA).
        is_value: Whether it is V's, see ``without_nan``.
    """

    def __init__(self, use_contiguous_pa: bool, is_value: bool = False) -> None:
        super().__init__()
        self.is_value = is_value
        self.use_contiguous_pa = use_contiguous_pa
        self.scale = DeviceScale()
        # Set by the worker for a decode over scattered blocks (sliding windows).
        self._fetch_by_id = False

    def forward(
        self,
        input: torch.Tensor | None,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        **kwargs,
    ) -> torch.Tensor:
        """Writes new rows.

        Args:
            input: [tokens, heads, dim] or [tokens, latent]; None in the decode of
                a cross-attention, which writes nothing.
            cache: FP8 [slots, ...], written.
            slot_mapping: [tokens], where each row goes.
            kwargs: What the worker passes to caches of other kinds.

        Returns:
            ``cache``.
        """
        if input is not None:
            rows = self.scale.quantize(without_nan(input, not self.is_value))
            # torch has no index_copy_ for FP8 on CPU; the bridge has.
            on_cpu = cache.device.type == "cpu"
            stored, rows = (storage(x) if on_cpu else x for x in (cache, rows))
            stored.index_copy_(0, slot_mapping, rows)
        return cache

    def fetch_codes(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Returns the FP8 blocks of a decode, [blocks, block_size, ...]."""
        if self.use_contiguous_pa and not self._fetch_by_id:
            return cache.narrow(0, 0, blocks.size(0))
        return cache.index_select(0, blocks)

    def fetch_from_cache(
        self, cache: torch.Tensor, blocks: torch.Tensor, **kwargs
    ) -> torch.Tensor:
        """Returns the context of a prefill, bfloat16 [blocks, block_size, ...].

        By block id always: these blocks are scattered, contiguous PA or not. NaN, which
        a mask that is added would not hide, is 0; decode finds it in the cache.
        """
        codes = cache.index_select(0, blocks)
        return without_nan(self.scale.dequantize(codes, torch.bfloat16), False)


def without_nan(rows: torch.Tensor, is_marked: bool) -> torch.Tensor:
    """Rows [..., dim] with 0 for NaN.

    What is hidden, or of another sequence, is multiplied by 0 and added, and 0 * NaN is
    NaN: V must have none. The logits of K are masked, so that K may say with its last
    number that there was one; the last of a latent belongs to K alone.

    Args:
        rows: Of any float dtype.
        is_marked: Whether the last number of a row that had NaN is NaN.
    """
    found = rows.isnan()
    clean = rows.masked_fill(found, 0.0)
    if not is_marked:
        return clean
    last = clean[..., -1:].masked_fill(found.any(-1, keepdim=True), torch.nan)
    return torch.cat((clean[..., :-1], last), -1)
