# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales on the device, and the two ways of quantising with them.

They are buffers: as graph inputs one recipe serves every layer, where a Python float
would compile one recipe a value. Not nn.Parameter, whose values vLLM's loader expects
in the checkpoint and its dummy loader fills with noise; buffers also survive a sleep.
"""

import math

import torch
from torch import nn

from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import AttentionScales, StaticScale
from vllm.logger import init_logger

logger = init_logger(__name__)

FP8 = torch.float8_e4m3fn
# Keeps the scale of an all-zero row positive; the HPU worker's constant.
_EPSILON = 1e-8


class DeviceScale(nn.Module):
    """One static scale: per tensor ([]) or per head ([heads]).

    Attributes:
        quant_scale: float32; q = cast(x * quant_scale). Its value is that of the
            activation dtype, in which the device multiplies.
        dequant_scale: float32; x = q * dequant_scale.
    """

    def __init__(self) -> None:
        super().__init__()
        # NaN until loaded: a forgotten scale must show.
        unset = torch.tensor(float("nan"), dtype=torch.float32)
        self.register_buffer("quant_scale", unset, persistent=False)
        self.register_buffer("dequant_scale", unset.clone(), persistent=False)

    def load(self, scale: StaticScale) -> None:
        """Takes over a scale; in place where shapes agree, as captured graphs need."""
        for name in ("quant_scale", "dequant_scale"):
            held, new = getattr(self, name), getattr(scale, name).detach().float()
            if held.shape == new.shape:
                held.copy_(new)
            else:
                setattr(self, name, new.to(held.device, copy=True))

    @property
    def is_per_head(self) -> bool:
        """Whether each head has its own."""
        return self.quant_scale.dim() > 0

    def quantize(self, values: torch.Tensor) -> torch.Tensor:
        """Casts [..., heads, dim] (per tensor: any shape) to FP8."""
        shape = [self.quant_scale.numel(), 1] if self.is_per_head else None
        return torch.ops.hpu.cast_to_fp8_v2(
            values, self.quant_scale, False, False, FP8, shape
        )[0]

    def dequantize(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Turns FP8 [..., heads, dim] back into values.

        The product is taken in float32: in bfloat16 the rounded scale would bias
        every value by up to 0.2 %.
        """
        shape = [self.dequant_scale.numel(), 1] if self.is_per_head else None
        values = torch.ops.hpu.cast_from_fp8(
            codes, self.dequant_scale, torch.float32, shape
        )
        return values.to(dtype)


def quantize_rows(
    values: torch.Tensor, fmt: Fp8Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts each row by its own amax.

    Args:
        values: [..., dim], bfloat16 or float32.
        fmt: The format of the device.

    Returns:
        FP8 [..., dim], and the dequant scales float32 [..., 1]: the reciprocals of
        the quant scales that acted, which are rounded to the dtype of ``values``.
    """
    rows = values.flatten(0, -2)
    amax = rows.abs().amax(-1, keepdim=True)
    quant_scale = ((amax + _EPSILON) / fmt.max).reciprocal()
    codes = torch.ops.hpu.cast_to_fp8_v2(rows, quant_scale, False, False, FP8)[0]
    dequant_scale = quant_scale.float().reciprocal()
    return codes.view(values.shape), dequant_scale.view(*values.shape[:-1], 1)


def quantize_tensor(
    values: torch.Tensor, fmt: Fp8Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts a tensor by its amax; returns FP8 and the 0-d float32 dequant scale.

    It holds several sequences: what is not finite in one leaves the scale alone.
    """
    amax = values.abs().nan_to_num(0.0, 0.0).amax()
    quant_scale = ((amax + _EPSILON) / fmt.max).reciprocal()
    codes = torch.ops.hpu.cast_to_fp8_v2(values, quant_scale, False, False, FP8)[0]
    return codes, quant_scale.float().reciprocal()


def probability_scale(scales: AttentionScales, fmt: Fp8Format) -> StaticScale:
    """The scale of P = exp(logit - largest logit), which reaches 1.

    Without one in the checkpoint: the largest power of two within the range, so
    that the smallest number kept is 2^-9 / 128 (Gaudi2) or 2^-9 / 256 (Gaudi3). A
    checkpoint's own was measured on normalised probabilities; where their largest
    was below 1 it would clip, so it is not used, and a warning says so.
    """
    largest = 2.0 ** math.floor(math.log2(fmt.max))
    if scales.prob is not None:
        if bool((scales.prob.quant_scale <= fmt.max).all()):
            return scales.prob
        logger.warning_once(
            "fp8_inc: %s: prob scales below 1 / %g cut off the probability 1, which "
            "the largest logit of each block has; 1 / %g serves in their place",
            scales.source,
            fmt.max,
            largest,
        )
    return StaticScale.from_dequant(1.0 / largest, scales.k.quant_scale.dtype)
