# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A compact DeepSeek-V2 architecture for training on one CPU thread.

Only what training needs: no cache, no padding, every expert computed for every
token. Parameter names are those of the checkpoint but for the routed experts,
which are stacked (see export.py).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes. Latent 512 + rope 64 are those of the real models, so that the
    cache has the real row of 576 values; the rest is as small as will learn."""

    vocab_size: int = 640
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    qk_nope: int = 32
    qk_rope: int = 64
    v_head: int = 32
    kv_lora: int = 512
    dense_intermediate: int = 512
    expert_intermediate: int = 128
    experts: int = 4
    experts_per_token: int = 2
    dense_layers: int = 1
    rope_theta: float = 10000.0
    max_positions: int = 1024
    eps: float = 1e-6


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Interleaved rotary embedding (pairs are neighbours).

    Args:
        x: [..., tokens, rope].
        cos: [tokens, rope / 2].
        sin: [tokens, rope / 2].
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return pairs.flatten(-2)


class Attention(nn.Module):
    """Multi-head latent attention, expanded to ordinary heads for training."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.q_proj = _linear(c.hidden, c.heads * (c.qk_nope + c.qk_rope))
        self.kv_a_proj_with_mqa = _linear(c.hidden, c.kv_lora + c.qk_rope)
        self.kv_a_layernorm = RMSNorm(c.kv_lora, c.eps)
        self.kv_b_proj = _linear(c.kv_lora, c.heads * (c.qk_nope + c.v_head))
        self.o_proj = _linear(c.heads * c.v_head, c.hidden)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        c = self.c
        batch, tokens, _ = x.shape
        heads = (batch, tokens, c.heads, -1)
        q = self.q_proj(x).view(heads).transpose(1, 2)
        q_nope, q_pe = q.split([c.qk_nope, c.qk_rope], -1)
        kv_c, k_pe = self.kv_a_proj_with_mqa(x).split([c.kv_lora, c.qk_rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(kv_c)).view(heads).transpose(1, 2)
        k_nope, v = kv.split([c.qk_nope, c.v_head], -1)
        k_pe = rotate(k_pe[:, None], cos, sin).expand(-1, c.heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_pe, cos, sin)], -1)
        k = torch.cat([k_nope, k_pe], -1)
        # The CPU flash kernel wants equal head sizes: pad v, drop the padding.
        v = F.pad(v, (0, q.shape[-1] - c.v_head))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out[..., : c.v_head].transpose(1, 2).reshape(batch, tokens, -1)
        return self.o_proj(out)


class MLP(nn.Module):
    """Gated SiLU feed-forward block."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = _linear(hidden, intermediate)
        self.up_proj = _linear(hidden, intermediate)
        self.down_proj = _linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Routed experts, stacked: three matrix products however many there are."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        wide = (c.experts, c.expert_intermediate, c.hidden)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(wide[0], wide[2], wide[1]))

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Args: x [batch, tokens, hidden]; share [batch, tokens, experts]."""
        inner = F.silu(F.linear(x, self.gate_proj.flatten(0, 1)))
        inner = inner * F.linear(x, self.up_proj.flatten(0, 1))
        inner = inner.unflatten(-1, (share.shape[-1], -1))
        inner = (inner * share[..., None]).flatten(-2)
        return F.linear(inner, self.down_proj.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    """Softmax routing to the best two experts, plus one shared expert."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.gate = _linear(c.hidden, c.experts)
        self.experts = Experts(c)
        self.shared_experts = MLP(c.hidden, c.expert_intermediate)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and the load-balance loss (1 when balanced)."""
        c = self.c
        probability = self.gate(x).softmax(-1)
        best = probability.topk(c.experts_per_token, -1).indices
        chosen = torch.zeros_like(probability).scatter(-1, best, 1.0)
        load = chosen.mean((0, 1)) * c.experts / c.experts_per_token
        balance = (load * probability.mean((0, 1))).sum()
        routed = self.experts(x, probability * chosen)
        return routed + self.shared_experts(x), balance


class Layer(nn.Module):
    """One decoder layer; the first ones have a dense feed-forward block."""

    def __init__(self, c: ModelConfig, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)
        self.is_dense = index < c.dense_layers
        self.mlp = MLP(c.hidden, c.dense_intermediate) if self.is_dense else MoE(c)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out = self.mlp(self.post_attention_layernorm(x))
        out, balance = (out, x.new_zeros(())) if self.is_dense else out
        return x + out, balance


class TrainingModel(nn.Module):
    """Token ids to final hidden states; the head is applied by the caller."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.eps)
        self.lm_head = _linear(c.hidden, c.vocab_size)
        frequency = c.rope_theta ** -(torch.arange(0, c.qk_rope, 2) / c.qk_rope)
        angle = torch.arange(c.max_positions)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, 0, self._initial_std(name, weight))

    def _initial_std(self, name: str, weight: torch.Tensor) -> float:
        if "embed_tokens" in name:
            return 0.5
        if "lm_head" in name or ".mlp.gate." in name:
            return 0.02  # start from even choices
        std = weight.shape[-1] ** -0.5
        # Outputs into the residual stream shrink with the number of them.
        into_residual = "o_proj" in name or "down_proj" in name
        return std * (2 * self.c.layers) ** -0.5 if into_residual else std

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layers on whole sequences that start at position 0.

        Args:
            ids: [batch, tokens], int64.

        Returns:
            Hidden states [batch, tokens, hidden], and the sum of the
            layers' load-balance losses.
        """
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embed_tokens(ids)
        total = x.new_zeros(())
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            total = total + balance
        return self.norm(x), total
