# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""How a checkpoint quantised its Linear layers and experts to FP8."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vllm.fp8_inc.adjustment import Adjustment


@dataclass(frozen=True)
class Fp8Recipe:
    """W8A8 FP8 as a checkpoint declares it.

    Attributes:
        weights: What one weight scale covers: all of a projection ("tensor"), one
            output channel, or a block of output channels x inputs.
        static_inputs: Whether the checkpoint has an input_scale for each
            projection. Without one activations are quantised per token as they
            come: the device's worker does so for every dynamic scheme, per tensor
            and per group too, and so does upstream where a kernel for it exists.
        adjustment: The rule of this checkpoint.
        block: Rows and columns of a block.
        scale_name: What the checkpoint calls the dequant scale of a weight.
    """

    weights: Literal["tensor", "channel", "block"]
    static_inputs: bool
    adjustment: Adjustment
    block: tuple[int, int] = (128, 128)
    scale_name: str = "weight_scale"

    def scale_loader(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a weight loader take weight scales in every producer's shape."""

        @functools.wraps(load)
        def load_scale(
            param: torch.nn.Parameter, scale: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            return load(param, self._in_our_shape(scale), *args, **kwargs)

        return load_scale

    def _in_our_shape(self, scale: torch.Tensor) -> torch.Tensor:
        if self.weights == "channel" and scale.dim() == 1:
            return scale[:, None]  # ModelOpt, Quark, AutoRound
        if self.weights == "block" and scale.dim() == 4:
            return scale[:, 0, :, 0]  # ModelOpt
        return scale
