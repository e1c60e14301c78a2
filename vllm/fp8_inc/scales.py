# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The static scales of an attention layer, checked and in the form kernels use."""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

_SMALLEST_NORMAL = 2.0**-126
_LARGEST = 1e30


@dataclass(frozen=True)
class StaticScale:
    """One per-tensor scale, as it acts on the device.

    The device multiplies by the quant scale rounded to the activation dtype, so
    reads undo exactly that value: 1 / quant_scale, not the dequant scale of the
    checkpoint, which would bias every read by up to 0.4 %.

    Attributes:
        quant_scale: 0-d, activation dtype; q = cast(x * quant_scale).
        dequant_scale: 0-d float32; x = q * dequant_scale.
    """

    quant_scale: torch.Tensor
    dequant_scale: torch.Tensor

    @classmethod
    def from_dequant(cls, dequant_scale: float, dtype: torch.dtype) -> "StaticScale":
        """Builds both multipliers from a checked dequant scale.

        Args:
            dequant_scale: x = q * dequant_scale, positive and finite.
            dtype: Dtype of the activations that are cast.

        Raises:
            ValueError: If 1 / dequant_scale is 0 or infinite in ``dtype``.
        """
        scale = torch.tensor(dequant_scale, dtype=torch.float32)
        quant_scale = scale.reciprocal().to(dtype)
        acting = quant_scale.float().reciprocal()
        if not (0 < quant_scale.item() < math.inf and acting.item() < math.inf):
            raise ValueError(
                f"dequant_scale {dequant_scale} has no reciprocal in {dtype}"
            )
        return cls(quant_scale, acting)


@dataclass(frozen=True)
class AttentionScales:
    """The scales of one attention layer.

    For MLA ``k`` and ``v`` are the same: one latent is cached for both.

    Attributes:
        k: For what is cached as K (MLA: kv_c and k_pe).
        v: For what is cached as V (MLA: read from the same bytes).
        q: For the query of the prefill, or None where the checkpoint has none.
        source: Where they come from, for the report.
        prob: For the softmax's output, or None where the checkpoint has none.
    """

    k: StaticScale
    v: StaticScale
    q: StaticScale | None
    source: str
    prob: StaticScale | None = None


def give_scales(layer: nn.Module, scales: AttentionScales) -> None:
    """Hands scales to an attention layer and to the layers that read its cache.

    Args:
        layer: An Attention or MLAAttention. Its implementation keeps them as
            ``scales``, and so do its pieces ``fp8_inc`` where it has some (on HPU).
        scales: Of what the layer writes.
    """
    layer.impl.scales = scales
    if pieces := getattr(layer.impl, "fp8_inc", None):
        pieces.load_scales(scales)
    for reader in getattr(layer.impl, "readers", ()):
        give_scales(reader, replace(scales, q=None))


def check_dequant_scale(value: float) -> None:
    """Checks that ``value`` can be a dequant scale.

    Raises:
        ValueError: If it is not positive and finite, or of a size that no amax has.
    """
    if not 0 < value < math.inf:
        raise ValueError(f"is {value}, but a dequant scale is positive and finite")
    if value < _SMALLEST_NORMAL:
        raise ValueError(
            f"is {value:g}, a subnormal float32 number (below {_SMALLEST_NORMAL:.3g}), "
            "which no calibration gives"
        )
    if value > _LARGEST:
        raise ValueError(f"is {value:g}, but no activation is above {_LARGEST:g}")


def read_dequant_scale(tensor: torch.Tensor) -> float:
    """Reads a per-tensor dequant scale of a checkpoint.

    Args:
        tensor: One element, any shape of ones, any floating dtype.

    Raises:
        ValueError: If it is not one positive finite number, as
            ``check_dequant_scale`` has it.
    """
    if tensor.numel() != 1:
        raise ValueError(
            f"has shape {tuple(tensor.shape)}, but one scale per tensor is expected"
        )
    if not tensor.is_floating_point():
        raise ValueError(f"has dtype {tensor.dtype}, but a floating dtype is expected")
    value = tensor.double().item()
    check_dequant_scale(value)
    return value
