# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The forms in which a scale reaches an operator, brought to one."""

import torch

ScaleArgument = torch.Tensor | float | list[float] | None


def scale_tensor(
    scale: ScaleArgument, like: torch.Tensor, shape: list[int] | None = None
) -> torch.Tensor | None:
    """Turns a scale into a tensor on the device of ``like``; its dtype is kept.

    Args:
        scale: A CPU 0-d tensor, a device tensor, a Parameter, a float or floats.
        like: The tensor that is scaled.
        shape: The shape in which the scale broadcasts, if it is not its own.

    Returns:
        The multiplier, float32 where it came as a number; None for None.
    """
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        scale = torch.tensor(scale, dtype=torch.float32)
    scale = scale.to(like.device)
    return scale if shape is None else scale.reshape(shape)
