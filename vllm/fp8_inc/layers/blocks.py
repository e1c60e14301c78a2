# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Weights with one scale for each block, as in the official DeepSeek checkpoints.

No Gaudi multiplies block-wise. Its worker requantises them per output channel while
loading (VLLM_HPU_FORCE_CHANNEL_FP8, its default: fp8_block_linear_postprocess_weights
in extension/ops.py of vllm-gaudi 091bbadd), and quantises activations per token.
That is done here too, so that a CPU has the device's numbers; the GPU kernels'
activation groups of 128 are not used.
"""

import torch

from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.layers.activations import quantize_rows


def blocks(size: int, block: int) -> int:
    """How many blocks cover a dimension; the last may be cut off."""
    return -(-size // block)


def scale_rows(widths: list[int], block_rows: int) -> torch.Tensor:
    """Returns which row of the scales each output channel belongs to.

    Args:
        widths: Output channels of each fused projection; blocks begin anew in each.
        block_rows: Output channels of a block.

    Returns:
        int64 [sum(widths)].
    """
    first, parts = 0, []
    for width in widths:
        parts.append(first + torch.arange(width) // block_rows)
        first += blocks(width, block_rows)
    return torch.cat(parts)


def requantize_per_channel(
    weight: torch.Tensor,
    dequant_scale: torch.Tensor,
    row_of: torch.Tensor,
    block_columns: int,
    fmt: Fp8Format,
) -> torch.Tensor:
    """Turns block scales into one scale for each output channel.

    Dequantised in bfloat16, scale and product, whatever the model's dtype: the
    worker does so.

    Args:
        weight: [N, K] float8_e4m3fn codes valid on the device; overwritten.
        dequant_scale: [block rows, block columns] float32.
        row_of: [N], the row of dequant_scale of each output channel.
        block_columns: Inputs of a block.
        fmt: The format of the device.

    Returns:
        float32 dequant scales [N] of the new codes.
    """
    scale = dequant_scale.bfloat16()[row_of].repeat_interleave(block_columns, dim=1)
    values = weight.bfloat16() * scale[:, : weight.shape[1]]
    codes, channel_scale = quantize_rows(values, fmt)
    weight.view(torch.uint8).copy_(codes)
    return channel_scale.flatten()


def check_fused(
    layer: str, widths: list[int], is_split: bool, block: tuple[int, int], inputs: int
) -> None:
    """Refuses layers whose blocks do not lie within one projection of one rank.

    Args:
        layer: Name of the layer, for errors.
        widths: Output channels of each fused projection on this rank.
        is_split: Whether tensor parallelism cuts this layer.
        block: Rows and columns of a block.
        inputs: Inputs on this rank.

    Raises:
        ValueError: Naming the layer and its sizes.
    """
    first = channels = 0
    for width in widths:
        # Upstream's loaders round the first channel of a projection up to a block.
        if blocks(channels, block[0]) != first:
            raise ValueError(
                f"{layer}: projections of {widths} output channels cannot be fused "
                f"with weight_block_size {list(block)}; all but the last must be "
                "multiples of it. Quantise the checkpoint per channel"
            )
        first += blocks(width, block[0])
        channels += width
    cut = [width for width in widths if width % block[0]]
    if is_split and (cut or inputs % block[1]):
        raise ValueError(
            f"{layer}: tensor parallelism cuts weight_block_size {list(block)} at "
            f"{widths} output channels x {inputs} inputs. Use fewer ranks"
        )
