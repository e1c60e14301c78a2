# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Prefill on HPU through the fused SDPA kernels, in FP8 or in bfloat16.

Stands where the worker has ModuleFP8FusedSDPA, with the same call signature.
"""

import torch
from torch import nn

from vllm.fp8_inc.attention.hpu_scales import (
    DeviceScale,
    probability_scale,
    quantize_tensor,
)
from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import AttentionScales, StaticScale

_ALL = (-1, -1)
# Arguments of the kernels in gaudi-pytorch-bridge 1.19; newer ones append
# window_size and sinks.
_FP8_ARGUMENTS = 19
_BF16_ARGUMENTS = 11


class PromptAttention(nn.Module):
    """The prefill of one attention layer.

    Args:
        fmt: The format of the device.
        matmul: "fp8" or "bf16".
    """

    def __init__(self, fmt: Fp8Format, matmul: str = "fp8") -> None:
        super().__init__()
        self.format = fmt
        self.matmul = matmul
        self.prob_scale = DeviceScale()
        self.scales = nn.ModuleDict()

    def load_scales(
        self, scales: AttentionScales, **static: StaticScale | None
    ) -> None:
        """Takes the scale of P, and static ones for any of q, k and v.

        One that is absent, or per head, which the kernel does not take, is measured
        on each tensor instead.
        """
        self.prob_scale.load(probability_scale(scales, self.format))
        for role, scale in static.items():
            measured = scale is None or scale.quant_scale.dim() > 0
            if measured and role in self.scales:
                del self.scales[role]
            if measured:
                continue
            if role not in self.scales:
                device = self.prob_scale.quant_scale.device
                self.scales[role] = DeviceScale().to(device)
            self.scales[role].load(scale)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        softmax_mode: str,
        recompute_mode: bool,
        valid_sequence_lengths: torch.Tensor | None,
        padding_side: str = "left",
        window_size: tuple[int, int] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends with all queries of a prompt.

        Args:
            query: bfloat16 [batch, heads, queries, dim].
            key: bfloat16 [batch, kv_heads, keys, dim].
            value: bfloat16 [batch, kv_heads, keys, value_dim].
            attn_mask: Added to the logits, causality included; or None.
            dropout_p: 0.
            is_causal: Ignored where a mask is given.
            scale: Multiplies the logits; None: dim ** -0.5.
            softmax_mode: "fast" or "fp32".
            recompute_mode: Ignored: nothing is trained.
            valid_sequence_lengths: [batch]; ignored where a mask is given.
            padding_side: Of the prompts.
            window_size: (left, right), or None.
            sinks: Must be None.

        Returns:
            bfloat16 [batch, heads, queries, value_dim].

        Raises:
            NotImplementedError: For sinks.
        """
        if sinks is not None:
            raise NotImplementedError(
                "--kv-cache-dtype fp8_inc on HPU does not support attention sinks; "
                "serve with --kv-cache-dtype auto"
            )
        if attn_mask is not None:
            is_causal, valid_sequence_lengths = False, None
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads != kv_heads:
            query = query.unflatten(1, (kv_heads, -1))
            key, value = key.unsqueeze(2), value.unsqueeze(2)
            attn_mask = attn_mask.unsqueeze(2) if attn_mask is not None else None
        attend = self._attend_bf16 if self.matmul == "bf16" else self._attend_fp8
        out = attend(
            (query, key, value),
            (attn_mask, dropout_p, query.shape[-1] ** -0.5 if scale is None else scale),
            is_causal,
            softmax_mode,
            (valid_sequence_lengths, padding_side),
            window_size,
        )
        return out if heads == kv_heads else out.flatten(1, 2)

    def _attend_bf16(self, qkv, mask, is_causal, softmax_mode, padding, window):
        kernel = torch.ops.hpu.sdpa_recomp_fwd
        newer = _appended(kernel, _BF16_ARGUMENTS, window)
        return kernel(*qkv, *mask, is_causal, False, softmax_mode, *padding, *newer)[0]

    def _attend_fp8(self, qkv, mask, is_causal, softmax_mode, padding, window):
        kernel = torch.ops.hpu.fp8_sdpa_recomp_fwd
        codes, dequant_scales = zip(
            *(self._quantize(role, x) for role, x in zip("qkv", qkv))
        )
        return kernel(
            *codes,
            *mask,
            is_causal,
            False,
            softmax_mode,
            *dequant_scales,
            self.prob_scale.quant_scale,
            None,
            self.prob_scale.dequant_scale,
            False,
            False,
            *padding,
            *_appended(kernel, _FP8_ARGUMENTS, window),
        )[0]

    def _quantize(
        self, role: str, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if role not in self.scales:
            return quantize_tensor(values, self.format)
        scale = self.scales[role]
        return scale.quantize(values), scale.dequant_scale


def _appended(kernel, known: int, window: tuple[int, int] | None) -> list:
    """The arguments that newer builds append.

    Raises:
        NotImplementedError: For a window where the kernel takes none.
    """
    names = [argument.name for argument in kernel.default._schema.arguments[known:]]
    if window is not None and "window_size" not in names:
        raise NotImplementedError(
            f"this build of the Gaudi bridge has no window_size in {kernel}; serve "
            "models with a sliding window with --kv-cache-dtype auto"
        )
    values = {"window_size": window or _ALL, "sinks": None}
    return [values[name] for name in names]
