# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The scale with which attention's output is least wrong.

Not the least error of the tensor: large values that attention hardly looks at may
saturate where that makes the others finer.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from vllm.fp8_inc.attention.dense import causal_attention
from vllm.fp8_inc.formats import Fp8Format

# What may be cut off: amax itself, and half an octave less each.
RATIOS = tuple(2 ** (-n / 2) for n in range(9))


def output_errors(
    layer: nn.Module,
    kept: Mapping[str, torch.Tensor],
    amax: Mapping[str, torch.Tensor],
    fmt: Fp8Format,
) -> tuple[dict[str, torch.Tensor], float]:
    """Squared errors of attention's output, one operand quantised at a time.

    Args:
        layer: An Attention or MLAAttention.
        kept: What an Observer kept of one whole prompt.
        amax: Role -> [heads] or [1], of all data: one scale a head, or one for all.
        fmt: The format of the cache.

    Returns:
        Role -> [heads, ratios] float64; the roles k, v and q, or latent and q. And
        the square of the output.
    """
    attend = _latent_attention if "kv_c" in kept else _attention
    operands = _operands(kept)
    exact = attend(layer, operands)
    errors = {}
    for role, x in operands.items():
        if role == "v" and "kv_c" in kept:
            continue
        most = role_amax(amax, role).to(x.device)
        columns = []
        for ratio in RATIOS:
            scale = (most * ratio / fmt.max).view(1, -1, 1)
            rounded = fmt.decode(fmt.cast(x, scale.reciprocal())) * scale
            changed = attend(layer, operands | {role: rounded})
            error = (changed - exact).double().square().sum((0, 2))
            columns.append(error.view(x.shape[1], -1).sum(1))
        errors[role] = torch.stack(columns, dim=1)
    return errors, exact.double().square().sum().item()


def role_amax(amax: Mapping[str, torch.Tensor], role: str) -> torch.Tensor:
    """The amax of a role; of the latent that of its whole row."""
    if role == "latent":
        return torch.maximum(amax["kv_c"], amax["k_pe"])
    return amax["q_latent"] if role == "q" and "kv_c" in amax else amax[role]


def _operands(kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if "kv_c" not in kept:
        return {role: x.float() for role, x in kept.items()}
    latent = torch.cat([kept["kv_c"], kept["k_pe"]], dim=-1)
    return {"q": kept["q_latent"].float(), "latent": latent.float()}


def _attention(layer: nn.Module, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    repeat = partial(
        torch.repeat_interleave, repeats=x["q"].shape[1] // x["k"].shape[1], dim=1
    )
    return causal_attention(x["q"], repeat(x["k"]), repeat(x["v"]), layer.impl.scale)


def _latent_attention(layer: nn.Module, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode's form; the output is what W_UV makes of the latent."""
    keys = x["latent"].expand(-1, x["q"].shape[1], -1)
    values = keys[..., : layer.kv_lora_rank]
    out = causal_attention(x["q"], keys, values, layer.impl.scale)
    return torch.bmm(out.transpose(0, 1), layer.W_UV.float()).transpose(0, 1)
