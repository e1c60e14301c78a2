# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which of a checkpoint's scales per head belong to a tensor-parallel rank."""

from collections.abc import Sequence


def local_heads(
    values: Sequence[float], local: int, rank: int, ranks: int
) -> tuple[float, ...]:
    """Takes the values of the heads that one rank has.

    Args:
        values: One for each head of the model; or one that serves all.
        local: Heads of this rank. Where there are more ranks than heads, each
            has one, and neighbouring ranks have the same.
        rank: Of this process, from 0.
        ranks: How many share the heads.

    Returns:
        The one value, or ``local`` of them.

    Raises:
        ValueError: If the number of values fits no number of heads of the model.
    """
    heads = len(values)
    if heads == 1:
        return tuple(values)
    if heads == local * ranks:
        return tuple(values[rank * local : (rank + 1) * local])
    if local == 1 and heads < ranks and ranks % heads == 0:
        return (values[rank * heads // ranks],)
    expected = f"{local * ranks}"
    if local == 1 and ranks > 1:
        expected += f" (or a divisor of {ranks})"
    raise ValueError(
        f"holds {heads} scales, but the layer has {expected} heads: one for each, "
        "or one for all, is expected"
    )
