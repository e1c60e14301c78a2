# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Causal attention over gathered keys and values, in float32."""

import itertools

import torch
import torch.nn.functional as F

# Queries are taken in tiles, so that the mask stays small.
_TILE = 512


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attends with the last queries of a sequence to all of it.

    Args:
        query: [queries, heads, dim]; query i stands at position
            keys - queries + i.
        key: [keys, heads, dim].
        value: [keys, heads, value_dim].
        scale: Multiplies the logits.
        window: A query sees this many last positions, itself included; None: all.

    Returns:
        [queries, heads, value_dim] float32.
    """
    queries, keys = query.shape[0], key.shape[0]
    q, k, v = (x.float().transpose(0, 1)[None] for x in (query, key, value))
    padding = q.shape[-1] - v.shape[-1]
    if padding > 0:
        # Equal head sizes take the fused CPU kernel, which holds no logits.
        v = F.pad(v, (0, padding))
    finite = bool((k.sum() + v.sum()).isfinite())
    if finite and queries == keys and window is None:
        tile = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return tile[0, ..., : value.shape[-1]].transpose(0, 1)
    out = q.new_empty(queries, query.shape[1], value.shape[-1])
    edges = {*range(0, queries, _TILE), queries}
    if not finite:
        edges.add(_first_spoiled(k, v, keys - queries, queries))
    for start, stop in itertools.pairwise(sorted(edges)):
        seen = keys - queries + stop
        ids = torch.arange(seen, device=q.device)
        positions = ids[keys - queries + start :, None]
        mask = ids <= positions
        if window is not None:
            mask &= ids > positions - window
        tile = F.scaled_dot_product_attention(
            q[:, :, start:stop],
            k[:, :, :seen],
            v[:, :, :seen],
            attn_mask=mask,
            scale=scale,
        )
        out[start:stop] = tile[0, ..., : value.shape[-1]].transpose(0, 1)
    return out


def _first_spoiled(k: torch.Tensor, v: torch.Tensor, before: int, queries: int) -> int:
    """The first query that sees a key or value that is not finite.

    0 times NaN is NaN: a tile must not hold such a key, behind its mask, where an
    earlier query is in it, since blocks before it may be another sequence's prefix.
    """
    finite = (k.isfinite().all(-1) & v.isfinite().all(-1)).all(dim=(0, 1))
    first = int(finite.logical_not().float().argmax()) if not finite.all() else 0
    return min(max(first - before, 0), queries)


class Joined:
    """Attention of some queries to keys that come in parts, in float32.

    Each part is attended to on its own; the logsumexp of its logits weighs it.

    Args:
        query: [queries, heads, dim].
        scale: Multiplies the logits.
        value_dim: Of every part, at most dim.
    """

    def __init__(self, query: torch.Tensor, scale: float, value_dim: int) -> None:
        self.query = query.float().transpose(0, 1)[None]
        self.scale = scale
        self.value_dim = value_dim
        self.out: torch.Tensor | None = None
        self.logsumexp: torch.Tensor | None = None

    def attend(self, key: torch.Tensor, value: torch.Tensor, causal: bool) -> None:
        """Adds a part.

        Args:
            key: [keys, heads, dim].
            value: [keys, heads, value_dim].
            causal: Whether these keys are the queries' own tokens; else all are seen.
        """
        k, v = (x.float().transpose(0, 1)[None] for x in (key, value))
        v = F.pad(v, (0, k.shape[-1] - self.value_dim))
        # What scaled_dot_product_attention calls on a CPU; it alone returns logsumexp.
        part, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.query, k, v, is_causal=causal, scale=self.scale
        )
        part, weight = part[0, ..., : self.value_dim], weight[0, ..., None]
        if causal and not (k.sum() + v.sum()).isfinite():
            first = _first_spoiled(k, v, 0, len(key))
            if first:  # these queries once more, without what stands behind them
                queries = self.query[0, :, :first].transpose(0, 1)
                clean = Joined(queries, self.scale, self.value_dim)
                clean.attend(key[:first], value[:first], causal=True)
                part[:, :first], weight[:, :first] = clean.out, clean.logsumexp
        if self.out is None:
            self.out, self.logsumexp = part, weight
            return
        both = torch.logaddexp(self.logsumexp, weight)
        self.out = torch.lerp(self.out, part, (weight - both).exp())
        self.logsumexp = both

    def result(self) -> torch.Tensor:
        """[queries, heads, value_dim] float32."""
        return self.out.transpose(0, 1)
