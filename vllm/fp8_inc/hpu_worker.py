# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the loading of scales does otherwise on HPU than on CPU."""

import os
from collections.abc import Iterable

from torch import nn


def is_served_here() -> bool:
    """Whether fp8_inc layers of this process are ours, on HPU.

    With QUANT_CONFIG the worker hands its attention modules to INC.
    """
    from vllm.platforms import current_platform

    is_hpu = current_platform.device_type == "hpu"
    return is_hpu and os.environ.get("QUANT_CONFIG") is None


def prepare(layers: Iterable[nn.Module]) -> None:
    """Readies the fp8_inc layers of a new model for ``ScaleLoader``.

    vLLM's methods and the worker's would find none of the checkpoint's scales, warn
    of 1.0, and write over those that ``ScaleLoader`` has set.

    Args:
        layers: Every Attention or MLAAttention with such a cache.
    """
    for layer in layers:
        layer.quant_method = None
        for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
            if hasattr(layer, name):
                delattr(layer, name)
