# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""hpu.sdpa_recomp_fwd and hpu.fp8_sdpa_recomp_fwd in software.

Softmax in float32 in every softmax_mode, over whole rows: the tiles of the device's
kernel and its fast exponential are not emulated.
"""

from collections.abc import Callable, Sequence

import torch

from vllm.fp8_inc.hpu_ops.casts import cast_to_fp8
from vllm.fp8_inc.hpu_ops.emulation import emulated_format
from vllm.fp8_inc.hpu_ops.scale_arguments import ScaleArgument, scale_tensor

_FP8 = torch.float8_e4m3fn


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention in the dtype of q.

    Args:
        q: [..., queries, dim]; heads of k and v broadcast to those of q.
        k: [..., keys, dim].
        v: [..., keys, value_dim].
        attention_mask: bool (True: seen) or added to the logits; broadcastable.
        p: Of dropout; must be 0.
        scale: Multiplies the logits.
        valid_seq_len: [batch]; keys beyond it are not seen.
        seq_padding_type: "left" or "right", where the padding lies.

    Returns:
        Output [..., queries, value_dim], the row maxima of the logits and the
        reciprocal row sums of the softmax [..., queries, 1], and an empty seed.
    """
    mask = _Mask(attention_mask, is_causal, valid_seq_len, seq_padding_type)
    out, maximum, inverse = _attend(q.float(), k.float(), v.float(), scale, mask, p)
    inverse_dtype = _inverse_dtype(q.dtype, softmax_mode)
    seed = q.new_empty(0)
    return out.to(q.dtype), maximum.to(q.dtype), inverse.to(inverse_dtype), seed


def sdpa_shapes(
    q, k, v, attention_mask, p, scale, is_causal, requires_backward, softmax_mode,
    valid_seq_len, seq_padding_type,
):  # fmt: skip
    """What sdpa returns, without values."""
    row = (*q.shape[:-1], 1)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(row),
        q.new_empty(row, dtype=_inverse_dtype(q.dtype, softmax_mode)),
        q.new_empty(0),
    )


def fp8_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    d_scale_q: ScaleArgument,
    d_scale_k: ScaleArgument,
    d_scale_v: ScaleArgument,
    q_scale_s: ScaleArgument,
    q_scale_o: ScaleArgument,
    d_scale_s: ScaleArgument,
    is_amax_s: bool,
    is_amax_0: bool,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
    window_size: Sequence[int] | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Attention over FP8 q, k and v, or over unquantised ones, as INC measures.

    The probabilities, relative to the maximum of their row and so in [0, 1], are
    quantised as cast(P * q_scale_s) and dequantised by d_scale_s, if q is FP8.

    Args:
        q: FP8 [..., queries, dim]; other arguments as those of ``sdpa``.
        d_scale_q: Dequant scale of q; d_scale_k and d_scale_v likewise.
        q_scale_s: Quant scale of P; None: 1.
        q_scale_o: Quant scale of the output; None: the output is bfloat16.
        d_scale_s: Dequant scale of P; None: 1.
        is_amax_s: Whether the amax of P is wanted.
        is_amax_0: Whether the amax of the output is wanted.
        window_size: (left, right): a query sees that many keys before and after
            it; -1 or None: all.
        sinks: [heads]: a logit a head that takes part in the sum of the softmax.

    Returns:
        Output, row maxima, reciprocal row sums, an empty seed, amax of P and of the
        output (float32, 0-d, or of shape [0] where not wanted).
    """
    fmt = emulated_format()
    amax_s = q.new_empty(0, dtype=torch.float32)

    def quantised(probabilities: torch.Tensor) -> torch.Tensor:
        nonlocal amax_s
        codes, amax_s = cast_to_fp8(probabilities, q_scale_s, False, is_amax_s, _FP8)
        is_fp8 = q.dtype == _FP8
        return _scaled(codes, d_scale_s, fmt.decode) if is_fp8 else probabilities

    values = [
        _scaled(codes, scale_of, fmt.decode)
        for codes, scale_of in ((q, d_scale_q), (k, d_scale_k), (v, d_scale_v))
    ]
    mask = _Mask(
        attention_mask, is_causal, valid_seq_len, seq_padding_type, window_size
    )
    out, maximum, inverse = _attend(*values, scale, mask, p, quantised, sinks)
    amax_o = out.abs().max() if is_amax_0 else q.new_empty(0, dtype=torch.float32)
    if q_scale_o is None:
        out = out.bfloat16()
    else:
        out = cast_to_fp8(out, q_scale_o, dtype=_FP8)[0]
    seed = q.new_empty(0, dtype=torch.float32)
    return out, maximum.bfloat16(), inverse.bfloat16(), seed, amax_s, amax_o


def fp8_sdpa_shapes(
    q, k, v, attention_mask, p, scale, is_causal, requires_backward, softmax_mode,
    d_scale_q, d_scale_k, d_scale_v, q_scale_s, q_scale_o, d_scale_s, is_amax_s,
    is_amax_0, valid_seq_len, seq_padding_type, window_size=None, sinks=None,
):  # fmt: skip
    """What fp8_sdpa returns, without values."""
    row = (*q.shape[:-1], 1)
    out_dtype = torch.bfloat16 if q_scale_o is None else _FP8
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype),
        q.new_empty(row, dtype=torch.bfloat16),
        q.new_empty(row, dtype=torch.bfloat16),
        q.new_empty(0, dtype=torch.float32),
        q.new_empty([] if is_amax_s else [0], dtype=torch.float32),
        q.new_empty([] if is_amax_0 else [0], dtype=torch.float32),
    )


class _Mask:
    """What a query does not see; applied to logits."""

    def __init__(self, mask, is_causal, valid_seq_len, padding, window=None) -> None:
        self.mask = mask
        self.is_causal = is_causal
        self.valid_seq_len = valid_seq_len
        self.padding = padding
        self.window = window or (-1, -1)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.mask is not None and self.mask.dtype != torch.bool:
            logits = logits + self.mask.float()
        elif self.mask is not None:
            logits = logits.masked_fill(~self.mask, -torch.inf)
        queries, keys = logits.shape[-2:]
        # How far a key stands after the query, which are the last positions.
        ids = torch.arange(keys, device=logits.device)
        ahead = ids - ids[keys - queries :, None]
        left, right = self.window
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if self.is_causal:
            hidden |= ahead > 0
        if left >= 0:
            hidden |= ahead < -left
        if right >= 0:
            hidden |= ahead > right
        logits = logits.masked_fill(hidden, -torch.inf)
        if self.valid_seq_len is None:
            return logits
        valid = self.valid_seq_len.view(-1, *[1] * (logits.dim() - 1))
        padded = ids >= valid if self.padding == "right" else ids < keys - valid
        return logits.masked_fill(padded, -torch.inf)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: _Mask,
    dropout: float,
    quantised: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 output, row maxima and reciprocal row sums; unseen rows are zero."""
    if dropout:
        raise NotImplementedError(f"SDPA in software: dropout {dropout}, only 0")
    logits = mask.apply(torch.matmul(q, k.mT) * scale)
    maximum = logits.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(*q.shape[1:-2], 1, 1)
        maximum = torch.maximum(maximum, sink)
    finite = maximum.masked_fill(maximum == -torch.inf, 0.0)
    probabilities = (logits - finite).exp()
    total = probabilities.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink - finite).exp()
    inverse = torch.where(total > 0, total.reciprocal(), 0.0)
    return torch.matmul(quantised(probabilities), v) * inverse, maximum, inverse


def _scaled(codes: torch.Tensor, scale: ScaleArgument, decode) -> torch.Tensor:
    fp8 = codes.dtype == _FP8
    values = decode(codes.view(torch.uint8)) if fp8 else codes.float()
    factor = scale_tensor(scale, codes)
    return values if factor is None else values * factor.float()


def _inverse_dtype(dtype: torch.dtype, softmax_mode: str) -> torch.dtype:
    fast = softmax_mode == "fast" and dtype == torch.bfloat16
    return torch.bfloat16 if fast else torch.float32
