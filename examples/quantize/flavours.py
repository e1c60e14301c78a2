# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The two ranges of FP8 E4M3, and values quantised to them per tensor.

The codes are float8_e4m3fn on disk in both cases. Gaudi2 computes with a variant
whose largest number is 240, and a checkpoint for it keeps every code within that.
"""

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

PER_TENSOR = QuantizationArgs(
    num_bits=8,
    type=QuantizationType.FLOAT,
    strategy=QuantizationStrategy.TENSOR,
    symmetric=True,
    dynamic=False,
)
NO_ZERO_POINT = None


@dataclass(frozen=True)
class Flavour:
    """A range of FP8 E4M3.

    Attributes:
        largest: The largest code a value may get.
        config_name: What `fp8_dtype_flavor` in config.json says.
    """

    largest: float
    config_name: str


FLAVOURS = {
    "240": Flavour(240.0, "float8_e4m3fnuz"),
    "448": Flavour(448.0, "float8_e4m3fn"),
}


def dequant_scale(amax: float, flavour: Flavour, key: str) -> torch.Tensor:
    """The scale that maps amax to the largest code: x is about q * scale.

    compressed-tensors' calculate_qparams always divides by float8_e4m3fn's 448,
    whatever the flavour, so the division is done here.

    Args:
        amax: Largest absolute value seen.
        flavour: The range to use.
        key: Tensor name, for the error.

    Returns:
        [1], fp32.

    Raises:
        ValueError: amax is not a positive finite number.
    """
    if not 0.0 < amax < float("inf"):
        raise ValueError(
            f"{key}: largest absolute value is {amax}; a scale needs a positive "
            "finite one (an expert that no token reached needs more texts)"
        )
    return torch.tensor([amax / flavour.largest], dtype=torch.float32)


def to_codes(x: torch.Tensor, scale: torch.Tensor, flavour: Flavour) -> torch.Tensor:
    """Rounds x / scale to the nearest FP8 code within the flavour's range.

    quantize() saturates at 448; the flavour's own limit is applied before it.

    Returns:
        float8_e4m3fn, shaped as x.
    """
    limit = scale * flavour.largest
    x = x.float().clamp(-limit, limit)
    return quantize(x, scale, NO_ZERO_POINT, PER_TENSOR, dtype=torch.float8_e4m3fn)


def from_codes(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The fp32 values the codes stand for."""
    return dequantize(codes, scale, args=PER_TENSOR, dtype=torch.float32)
