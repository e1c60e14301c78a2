# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The fused kernels of habana_frameworks.torch.hpex, in plain PyTorch."""

import enum
from typing import Any

import torch
from torch import Tensor


class RotaryPosEmbeddingMode(enum.Enum):
    """Which halves are rotated into each other."""

    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> Tensor:
    """Rotates ``x`` by angles given as cos and sin, in float32.

    Args:
        x: Any dtype [..., size].
        cos: Broadcastable to ``x``, as ``sin``.
        sin: See ``cos``.
        position_ids: Not used: the caller has selected the rows.
        offset: Not used.
        mode: BLOCKWISE pairs i with i + size / 2, PAIRWISE 2 i with 2 i + 1.

    Returns:
        Shape and dtype of ``x``.
    """
    values = x.float()
    if mode is RotaryPosEmbeddingMode.BLOCKWISE:
        first, second = values.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-values[..., 1::2], values[..., ::2]), -1).flatten(-2)
    return (values * cos.float() + turned * sin.float()).to(x.dtype)


class FusedRMSNorm:
    """RMS norm in float32."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, *args: Any) -> Tensor:
        """x / rms(x) * weight over the last dimension; dtype of ``x``."""
        values = x.float()
        mean = values.pow(2).mean(-1, keepdim=True)
        return (values * torch.rsqrt(mean + eps) * weight.float()).to(x.dtype)


def is_gqa(query: Tensor, key: Tensor) -> bool:
    """Whether [batch, heads, tokens, size] have different numbers of heads."""
    return query.shape[1] != key.shape[1]


def gqa_input_reshape_fwd(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """[batch, heads, ...] to [batch, kv_heads, heads / kv_heads or 1, ...]."""
    query = query.unflatten(1, (key.shape[1], -1))
    mask = None if mask is None else mask.unsqueeze(2)
    return query, key.unsqueeze(2), value.unsqueeze(2), mask


def gqa_output_reshape(output: Tensor) -> Tensor:
    """The inverse of gqa_input_reshape_fwd for the output."""
    return output.flatten(1, 2)


class FusedSDPA:
    """Attention over unquantised operands."""

    @staticmethod
    def apply(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute: bool | None = None,
        valid_seq_len: Tensor | None = None,
        padding_side: str = "left",
        is_amax_s: bool = False,
        is_amax_o: bool = False,
        window_size: tuple[int, int] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(query @ key * scale + mask) @ value.

        Raises:
            ValueError: For windows and sinks, which are not simulated.
        """
        if sinks is not None or window_size not in (None, (-1, -1)):
            raise ValueError("the software Gaudi has no sliding window and no sinks")
        grouped = is_gqa(query, key)
        operands = (query, key, value, attn_mask)
        output = torch.ops.hpu.sdpa_recomp_fwd(
            *(gqa_input_reshape_fwd(*operands) if grouped else operands),
            dropout_p,
            query.shape[-1] ** -0.5 if scale is None else scale,
            is_causal,
            False,
            softmax_mode,
            valid_seq_len,
            padding_side,
        )[0]
        return gqa_output_reshape(output) if grouped else output


def fp8_fused_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softmax_mode: str = "fast",
    d_scale_q: Tensor | float | None = None,
    d_scale_k: Tensor | float | None = None,
    d_scale_v: Tensor | float | None = None,
    q_scale_s: Tensor | float | None = None,
    q_scale_o: Tensor | float | None = None,
    d_scale_s: Tensor | float | None = None,
    is_amax_s: bool = False,
    is_amax_o: bool = False,
    valid_seq_len: Tensor | None = None,
    seq_padding_type: str = "left",
    *args: Any,
) -> tuple[Tensor, ...]:
    """Attention over FP8 operands; d_scales are dequant, q_scales quant scales.

    Returns:
        Output, amax of P and of the output. INC records the second, and in files
        measured on real devices it is 1.0, the amax of P.
    """
    scales = (d_scale_q, d_scale_k, d_scale_v, q_scale_s, q_scale_o, d_scale_s)
    grouped = is_gqa(query, key)
    operands = (query, key, value, attn_mask)
    output, _, _, _, amax_s, amax_o = torch.ops.hpu.fp8_sdpa_recomp_fwd(
        *(gqa_input_reshape_fwd(*operands) if grouped else operands),
        dropout_p,
        query.shape[-1] ** -0.5 if scale is None else scale,
        is_causal,
        False,
        softmax_mode,
        *map(_tensor, scales),
        is_amax_s,
        is_amax_o,
        valid_seq_len,
        seq_padding_type,
    )
    return gqa_output_reshape(output) if grouped else output, amax_s, amax_o


def _tensor(scale: Tensor | float | None) -> Tensor | None:
    if isinstance(scale, float):
        return torch.tensor(scale, dtype=torch.float32)
    return scale
