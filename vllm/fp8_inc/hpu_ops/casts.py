# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""hpu.cast_to_fp8_v2 and hpu.cast_from_fp8 in software.

Every scale multiplies, and every product is taken in the wide dtype with the scale
cast to it first, as the bridge's tests (tests/pytest_working/any_mode/test_fp8.py)
compare bit by bit.
"""

import torch

from vllm.fp8_inc.hpu_ops.emulation import emulated_format
from vllm.fp8_inc.hpu_ops.scale_arguments import ScaleArgument, scale_tensor

_FP8 = torch.float8_e4m3fn


def cast_to_fp8(
    input: torch.Tensor,
    scale: ScaleArgument = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = cast(input * scale).

    Args:
        input: bfloat16, float16 or float32 of any shape; FP8 passes unchanged.
        scale: The quant scale, broadcastable to ``input``; None: 1.
        stochastic_rounding: Not emulated.
        is_amax: Whether max|input|, before scaling, is wanted.
        dtype: torch.float8_e4m3fn, which is named even on Gaudi2.
        scale_shape: Shape in which ``scale`` broadcasts.

    Returns:
        The FP8 tensor, and the amax: float32, 0-d, or of shape [0] where not wanted.

    Raises:
        NotImplementedError: For another dtype or stochastic rounding.
    """
    if dtype != _FP8 or stochastic_rounding:
        raise NotImplementedError(
            f"cast_to_fp8_v2 in software: dtype {dtype}, stochastic_rounding "
            f"{stochastic_rounding}; only {_FP8}, rounded to nearest even"
        )
    amax = input.abs().max().float() if is_amax else input.new_empty(0).float()
    if input.dtype == _FP8:
        return input.clone(), amax
    factor = scale_tensor(scale, input, scale_shape)
    scaled = input if factor is None else input * factor.to(input.dtype)
    return emulated_format().encode(scaled).view(_FP8), amax


def cast_to_fp8_shapes(
    input, scale=None, stochastic_rounding=False, is_amax=False, dtype=None,
    scale_shape=None,
):  # fmt: skip
    """What cast_to_fp8 returns, without values."""
    amax = input.new_empty([] if is_amax else [0], dtype=torch.float32)
    return torch.empty_like(input, dtype=dtype), amax


def cast_from_fp8(
    input: torch.Tensor,
    scale: ScaleArgument,
    out_dtype: torch.dtype,
    scale_shape: list[int] | None = None,
) -> torch.Tensor:
    """x = input * scale, the product in ``out_dtype``.

    Args:
        input: FP8 of any shape.
        scale: The dequant scale, broadcastable to ``input``; None: 1.
        out_dtype: bfloat16, float16 or float32.
        scale_shape: Shape in which ``scale`` broadcasts.
    """
    values = emulated_format().decode(input.view(torch.uint8)).to(out_dtype)
    factor = scale_tensor(scale, input, scale_shape)
    return values if factor is None else values * factor.to(out_dtype)


def cast_from_fp8_shapes(input, scale, out_dtype, scale_shape=None):
    """What cast_from_fp8 returns, without values."""
    return torch.empty_like(input, dtype=out_dtype)
