# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The maxima of all ranks as one."""

from collections.abc import Sequence

from vllm.fp8_inc.calibration.worker import Numbers

# (rank, number of ranks, maxima) of one worker.
OfRank = tuple[int, int, Numbers]
_ONE_FOR_ALL = ("kv_c", "k_pe", "latent")


def unify(
    workers: Sequence[OfRank], heads: int, kv_heads: int, per_head: bool
) -> Numbers:
    """Joins what the workers saw.

    Tensor-parallel ranks hold the heads in order; where there are fewer KV heads
    than ranks, neighbours hold the same one. The latent is the same on all. Pipeline
    stages hold different layers.

    Args:
        workers: Of every worker of the engine.
        heads: Query heads of the whole model.
        kv_heads: KV heads of the whole model.
        per_head: Whether to keep a number a head; else the largest stands for all.
    """
    result: Numbers = {}
    for rank, ranks, layers in workers:
        for layer, roles in layers.items():
            merged = result.setdefault(layer, {})
            for role, numbers in roles.items():
                if not per_head or role in _ONE_FOR_ALL:
                    merged[role] = [max(*merged.get(role, [0.0]), *numbers)]
                    continue
                total = kv_heads if role in ("k", "v") else heads
                first = rank * total // ranks
                whole = merged.setdefault(role, [0.0] * total)
                for n, number in enumerate(numbers, first):
                    whole[n] = max(whole[n], number)
    return result


def growth(before: Numbers, after: Numbers) -> tuple[float, str]:
    """The largest relative growth of a maximum, and which it was."""
    most, which = 0.0, "none"
    for layer, roles in after.items():
        for role, numbers in roles.items():
            for old, new in zip(before[layer][role], numbers, strict=True):
                if old > 0 and new / old - 1 > most:
                    most, which = new / old - 1, f"{role} of {layer}"
    return most, which
