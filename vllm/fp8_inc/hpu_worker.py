# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Whose attention serves on HPU, and what loading scales does otherwise there."""

import os
from collections.abc import Iterable

from torch import nn

from vllm.fp8_inc.sources.inc.config_file import read_mode
from vllm.logger import init_logger

logger = init_logger(__name__)


def is_hpu() -> bool:
    """Whether this process has the HPU platform.

    Not by its device_type: the worker sets that to cpu while weights load for INC.
    """
    from vllm.platforms import current_platform

    return current_platform.device_name == "hpu"


def is_served_here() -> bool:
    """Whether fp8_inc layers of this process are ours, on HPU.

    Raises:
        ValueError: If QUANT_CONFIG names a file that cannot be read.
    """
    return is_hpu() and not is_measured()


def is_measured() -> bool:
    """Whether INC measures the worker's own attention modules, which then serve.

    Raises:
        ValueError: If QUANT_CONFIG names a file that cannot be read.
    """
    quant_config = os.environ.get("QUANT_CONFIG")
    if not quant_config or read_mode(quant_config) != "MEASURE":
        return False
    logger.info_once(
        "fp8_inc: %s measures: the attention modules are the worker's own, which INC "
        "observes. Measure with --kv-cache-dtype auto; serve with fp8_inc and the "
        "QUANTIZE configuration of the same folder",
        quant_config,
    )
    return True


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
