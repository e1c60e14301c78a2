# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Running maxima of what one attention layer caches and multiplies.

A forward pre-hook on the layer sees q, k and v after RoPE, or q, the normalised
latent and k_pe: the values that are cached and multiplied, whatever the backend.
P needs no look: the first token of a prompt attends to itself alone, so that its
P is exactly 1, which no probability exceeds.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# Magnitudes of bfloat16 without their last 3 bits: the bins of a histogram, each
# at most 1/16 wide.
_DROPPED_BITS = 3
_BINS = 2**15 >> _DROPPED_BITS


def amax_of_heads(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each head; NaN where one is NaN.

    Args:
        x: [tokens, heads, size].

    Returns:
        [heads] float32.
    """
    if x.dtype.itemsize == 2 and x.device.type == "cpu":
        # The bits of magnitudes sort as they do, NaN last; 19 times faster than
        # abs().amax() over two dimensions.
        bits = (x.view(torch.int16) & 0x7FFF).amax(0).amax(-1)
        return bits.view(x.dtype).float()
    return x.abs().amax(0).amax(-1).float()


def histogram_of_heads(x: torch.Tensor) -> torch.Tensor:
    """How many magnitudes of each head fall into each bin: [heads, bins] int64."""
    bits = x.bfloat16().contiguous().view(torch.int16) & 0x7FFF
    bins = (bits >> _DROPPED_BITS).long()
    bins += torch.arange(x.shape[1], device=x.device)[:, None] * _BINS
    return bins.flatten().bincount(minlength=x.shape[1] * _BINS).view(-1, _BINS)


def percentile_of(histogram: torch.Tensor, percent: float) -> torch.Tensor:
    """The upper edge of the bin below which ``percent`` of the magnitudes lie.

    Args:
        histogram: [heads, bins].
        percent: Over 0, at most 100.

    Returns:
        [heads] float32.
    """
    counts = histogram.double().cumsum(-1)
    enough = counts >= counts[:, -1:] * (percent / 100)
    bins = enough.int().argmax(-1)
    edge = ((bins + 1) << _DROPPED_BITS).to(torch.int16)
    return edge.view(torch.bfloat16).float()


@dataclass
class Observer:
    """Sees every call of one layer.

    Attributes:
        layer: An Attention or an MLAAttention.
        cache_slots: What slots lie below; padding is beyond, or negative.
        histograms: Whether to keep them: percentiles need them.
        amax: Role -> [heads] float32, the maximum so far. Roles are q, k and v, or
            q, q_latent, kv_c and k_pe.
        counts: Role -> histogram.
        tokens: How many were seen.
        kept: The last call's tensors, where ``keep`` is set.
    """

    layer: nn.Module
    cache_slots: int
    histograms: bool = False
    amax: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0
    keep: bool = False
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def attach(self) -> Any:
        """Starts; ``remove()`` of what it returns ends it."""
        return self.layer.register_forward_pre_hook(self._before, with_kwargs=True)

    @property
    def is_mla(self) -> bool:
        """Whether a latent is cached."""
        return hasattr(self.layer, "kv_lora_rank")

    def _before(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        rows = _written_rows(layer.layer_name, self.cache_slots)
        if rows is None:
            return
        # The HPU worker's tensors are [batch, tokens, ...], padded.
        shapes = self._shapes()
        given = dict(zip(shapes, args)) | kwargs
        first, second, third = (
            given[name].reshape(-1, *shape)[rows] for name, shape in shapes.items()
        )
        self.tokens += first.shape[0]
        if self.is_mla:
            seen = self._latent(first, second, third)
        else:
            seen = {"q": first, "k": second, "v": third}
        for role, x in seen.items():
            self._see(role, x)
        if self.keep:
            self.kept = {role: x.clone() for role, x in seen.items()}

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """[heads, size] of a token's tensors, by the names of forward's arguments."""
        layer = self.layer
        if self.is_mla:
            return {
                "q": (layer.num_heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim),
                "kv_c_normed": (1, layer.kv_lora_rank),
                "k_pe": (1, layer.qk_rope_head_dim),
            }
        return {
            "query": (layer.num_heads, layer.head_size),
            "key": (layer.num_kv_heads, layer.head_size),
            "value": (layer.num_kv_heads, layer.head_size_v),
        }

    def _latent(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        layer = self.layer
        nope, pe = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        latent = torch.bmm(nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
        return {
            "q": q,
            "q_latent": torch.cat([latent, pe], dim=-1),
            "kv_c": kv_c,
            "k_pe": k_pe,
        }

    def _see(self, role: str, x: torch.Tensor) -> None:
        new = amax_of_heads(x)
        known = self.amax.get(role)
        if known is not None:  # of a calibration that is resumed: on the host
            new = torch.maximum(known.to(new.device), new)
        self.amax[role] = new
        if self.histograms:
            counts = histogram_of_heads(x)
            self.counts[role] = self.counts.get(role, 0) + counts


def _written_rows(layer_name: str, cache_slots: int) -> slice | torch.Tensor | None:
    """The tokens of the running batch that are cached; None while vLLM warms up."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        metadata = metadata[0]
    if isinstance(metadata, dict):
        metadata = metadata.get(layer_name)
    if metadata is None:
        return None
    slots = metadata.slot_mapping.flatten()
    slots = slots[: getattr(metadata, "num_actual_tokens", len(slots))]
    written = (slots >= 0) & (slots < cache_slots)
    return slice(len(slots)) if bool(written.all()) else written.nonzero().flatten()
