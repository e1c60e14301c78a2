# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the loading of scales does otherwise on HPU than on CPU."""

import os

from torch import nn


def is_served_here() -> bool:
    """Whether fp8_inc layers of this process are ours, on HPU.

    With QUANT_CONFIG the worker hands its attention modules to INC.
    """
    from vllm.platforms import current_platform

    is_hpu = current_platform.device_type == "hpu"
    return is_hpu and os.environ.get("QUANT_CONFIG") is None


def prepare(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Readies the fp8_inc layers of a new model for ``ScaleLoader``.

    Args:
        layers: Every Attention or MLAAttention with such a cache, by layer name.

    Returns:
        Those that write a cache. One that only reads another layer's gets that
        layer's scales with it.
    """
    for layer in layers.values():
        _drop_upstream_scales(layer)
        layer.impl.readers = []
    writers = {}
    for name, layer in layers.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target is None:
            writers[name] = layer
        else:
            layers[target].impl.readers.append(layer)
    return writers


def _drop_upstream_scales(layer: nn.Module) -> None:
    """Takes an attention layer's own quantisation method and its parameters away.

    vLLM's methods and the worker's would find none of the checkpoint's scales, warn
    of 1.0, and write over those that ``ScaleLoader`` has set.
    """
    layer.quant_method = None
    for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
        if hasattr(layer, name):
            delattr(layer, name)
