# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The static scales of an attention layer, checked and in the form kernels use."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

_SMALLEST_NORMAL = 2.0**-126
_LARGEST = 1e30


@dataclass(frozen=True)
class StaticScale:
    """One scale, per tensor or per head, as it acts on the device.

    The device multiplies by the quant scale rounded to the activation dtype, so
    reads undo exactly that value: 1 / quant_scale, not the dequant scale of the
    checkpoint, which would bias every read by up to 0.4 %.

    Attributes:
        quant_scale: [] or [heads], activation dtype; q = cast(x * quant_scale).
        dequant_scale: [] or [heads] float32; x = q * dequant_scale.
    """

    quant_scale: torch.Tensor
    dequant_scale: torch.Tensor

    @classmethod
    def from_dequant(
        cls, dequant_scale: float | Sequence[float], dtype: torch.dtype
    ) -> "StaticScale":
        """Builds both multipliers from checked dequant scales.

        Args:
            dequant_scale: x = q * dequant_scale, positive and finite; one, or one
                for each head.
            dtype: Dtype of the activations that are cast.

        Raises:
            ValueError: If 1 / dequant_scale is 0 or infinite in ``dtype``.
        """
        scale = torch.tensor(dequant_scale, dtype=torch.float32)
        quant_scale = scale.reciprocal().to(dtype)
        acting = quant_scale.float().reciprocal()
        good = (quant_scale > 0) & quant_scale.isfinite() & acting.isfinite()
        if not good.all():
            values = [dequant_scale] if scale.ndim == 0 else list(dequant_scale)
            bad = values[good.flatten().tolist().index(False)]
            raise ValueError(f"dequant_scale {bad} has no reciprocal in {dtype}")
        return cls(quant_scale, acting)

    @property
    def per_head(self) -> bool:
        """Whether each head has its own scale."""
        return self.dequant_scale.ndim == 1

    def of_heads(self, multiplier: torch.Tensor) -> torch.Tensor:
        """Shapes one of the two for [..., heads, head_size]: [] or [heads, 1]."""
        return multiplier[:, None] if self.per_head else multiplier


@dataclass(frozen=True)
class AttentionScales:
    """The scales of one attention layer.

    For MLA ``k`` and ``v`` are the same: one latent is cached for both.

    Attributes:
        k: For what is cached as K (MLA: kv_c and k_pe).
        v: For what is cached as V (MLA: read from the same bytes).
        q: For the query of MHA and of the prefill of MLA, or None where the
            checkpoint has none.
        source: Where they come from, for the report.
        prob: For the softmax's output, or None where the checkpoint has none.
        q_latent: For the query that MLA absorbs kv_b_proj into to decode, which has
            another range than ``q``; None: per token by its amax.
    """

    k: StaticScale
    v: StaticScale
    q: StaticScale | None
    source: str
    prob: StaticScale | None = None
    q_latent: StaticScale | None = None


def give_scales(layer: nn.Module, scales: AttentionScales) -> None:
    """Hands scales to an attention layer.

    Args:
        layer: An Attention or MLAAttention. Its implementation keeps them as
            ``scales``, and so do its pieces ``fp8_inc`` where it has some (on HPU).
        scales: Of the cache that the layer reads.
    """
    layer.impl.scales = scales
    if pieces := getattr(layer.impl, "fp8_inc", None):
        pieces.load_scales(scales)


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


def read_dequant_scales(tensor: torch.Tensor) -> tuple[float, ...]:
    """Reads the dequant scales of a checkpoint, per tensor or per head.

    Args:
        tensor: One element, or one for each head: [heads], [heads, 1, 1] or
            [1, heads, 1]. Any floating dtype.

    Returns:
        One value, or one for each head.

    Raises:
        ValueError: If a value is not a positive finite number, as
            ``check_dequant_scale`` has it, or the shape is another one.
    """
    if tensor.numel() == 0 or sum(size > 1 for size in tensor.shape) > 1:
        raise ValueError(
            f"has shape {tuple(tensor.shape)}, but one scale per tensor or one per "
            "head is expected"
        )
    if not tensor.is_floating_point() or tensor.dtype == torch.float4_e2m1fn_x2:
        raise ValueError(f"has dtype {tensor.dtype}, but a floating dtype is expected")
    values = tuple(tensor.double().flatten().tolist())
    for value in values:
        check_dequant_scale(value)
    return values


def read_dequant_scale(tensor: torch.Tensor) -> float:
    """Reads the one dequant scale of a tensor; raises as ``read_dequant_scales``."""
    if tensor.numel() != 1:
        raise ValueError(
            f"has shape {tuple(tensor.shape)}, but one scale per tensor is expected"
        )
    return read_dequant_scales(tensor)[0]
