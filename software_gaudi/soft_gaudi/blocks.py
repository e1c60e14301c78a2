# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""hpu.block_softmax_adjustment: joins the softmax of a sequence's blocks."""

import torch
from torch import Tensor


def adjustment(
    block_max: Tensor,
    block_sums: Tensor,
    block_groups: Tensor,
    batch_size: int,
    out_shape: list[int],
) -> Tensor:
    """The factor that turns a block's own softmax into its part of the sequence's.

    Args:
        block_max: [blocks, ...] largest score of each block.
        block_sums: As block_max: sum of exp(score - block_max).
        block_groups: int [blocks] sequence of each block; -1 and ``batch_size`` are
            padding.
        batch_size: Number of sequences.
        out_shape: Shape of the result, as many elements as block_max.

    Returns:
        exp(block_max - max of the sequence) / sum of the sequence; dtype of block_max.
    """
    blocks = block_max.shape[0]
    largest = block_max.float().reshape(blocks, -1)
    sums = block_sums.float().reshape(blocks, -1)
    groups = torch.where(block_groups < 0, batch_size, block_groups).long()
    shape = (batch_size + 1, largest.shape[1])
    group_max = largest.new_full(shape, -torch.inf)
    group_max.index_reduce_(0, groups, largest, "amax")
    # A block of nothing but masked scores: -inf minus -inf.
    factor = (largest - group_max[groups]).exp().nan_to_num(0.0)
    own = sums * factor
    total = largest.new_zeros(shape).index_add_(0, groups, own)[groups]
    result = factor / torch.maximum(total, own)
    return result.to(block_max.dtype).view(out_shape)


def fake_adjustment(
    block_max: Tensor,
    block_sums: Tensor,
    block_groups: Tensor,
    batch_size: int,
    out_shape: list[int],
) -> Tensor:
    """Shape and dtype of the result."""
    return block_max.new_empty(out_shape)
