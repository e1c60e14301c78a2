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
    out = q.new_empty(queries, query.shape[1], value.shape[-1])
    edges = {*range(0, queries, _TILE), queries}
    if not (k.sum() + v.sum()).isfinite():
        edges.add(_first_spoiled(k, v, keys - queries, queries))
    for start, stop in itertools.pairwise(sorted(edges)):
        positions = torch.arange(start, stop)[:, None] + (keys - queries)
        seen = keys - queries + stop
        ids = torch.arange(seen)
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
