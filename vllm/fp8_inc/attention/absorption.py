# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""When MLA attends to a cached context in latent space, and what it then sees."""

import math

import torch

from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.layers.activations import quantize
from vllm.fp8_inc.layers.linear import PlainLinearMethod


def break_even(latent: int, nope: int, value: int) -> float:
    """New tokens from which on expanding the context takes fewer operations.

    A token of the context and a head take latent * (nope + value) multiply-adds to
    expand, and each new token then nope + rope + value; in latent space each new token
    takes 2 * latent + rope.
    """
    saved = 2 * latent - nope - value
    return latent * (nope + value) / saved if saved > 0 else math.inf


def is_exact(kv_b_proj: torch.nn.Module) -> bool:
    """Whether W_UK and W_UV are the weight that kv_b_proj multiplies with.

    FP8 layers of QUANT_CONFIG are quantised after both were taken from them, and layers
    that are not ours may do anything.
    """
    is_plain = isinstance(kv_b_proj.quant_method, PlainLinearMethod)
    return is_plain or hasattr(kv_b_proj, "dequantized_weight")


def quantizes_inputs(kv_b_proj: torch.nn.Module) -> bool:
    """Whether it is an FP8 layer of ours; static or dynamic."""
    return hasattr(kv_b_proj, "input_quant_scale")


def as_seen(
    kv_b_proj: torch.nn.Module, kv_c: torch.Tensor, fmt: Fp8Format
) -> torch.Tensor:
    """Quantises [tokens, latent] as the layer does, and dequantises it: float32."""
    codes, dequant_scale = quantize(kv_c, kv_b_proj.input_quant_scale, fmt)
    return fmt.decode(codes) * dequant_scale
