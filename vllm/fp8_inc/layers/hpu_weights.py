# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The weight that MLA absorbs on HPU, from FP8 layers of compressed-tensors."""

import functools

import torch
from torch import nn


def offer_dequantized(layer: nn.Module) -> None:
    """Lets vLLM read the weight of an FP8 layer without multiplying by an identity.

    MLA absorbs kv_b_proj. With static activations the worker has only the identity,
    whose ones become the FP8 number next to 1 / input scale: all weights come out up
    to 6 % too large or small, and far too small where 1 / input scale saturates.
    Layers with a scale a block are read otherwise.

    Args:
        layer: Its ``weight`` will be [in, out] float8_e4m3fn and its ``weight_scale``
            [out, 1] or [out], the dequant scales, once it is processed.
    """
    if layer.weight_block_size is None:
        layer.dequantized_weight = functools.partial(_dequantized, layer)


def _dequantized(layer: nn.Module, out_dtype: torch.dtype) -> torch.Tensor:
    scale = layer.weight_scale.float().view(-1, 1)
    return (layer.weight.float().t() * scale).to(out_dtype)
