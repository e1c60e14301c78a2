# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""transformers' DeepSeek-V2 with one module per expert.

transformers 5 keeps the experts of a layer stacked in one parameter. With one
nn.Linear per matrix, module names are the checkpoint's, and a hook on any Linear
sees that Linear's own input.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import DeepseekV2ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Experts,
    DeepseekV2MLP,
)


class UnstackedExperts(nn.ModuleList):
    """Takes the place of DeepseekV2Experts; children are named 0, 1, ..."""

    @classmethod
    def of(cls, stacked: DeepseekV2Experts) -> "UnstackedExperts":
        experts = cls()
        for gate_up, down in zip(stacked.gate_up_proj, stacked.down_proj, strict=True):
            expert = DeepseekV2MLP(stacked.config, stacked.intermediate_dim)
            expert.gate_proj.weight.data, expert.up_proj.weight.data = gate_up.chunk(2)
            expert.down_proj.weight.data = down
            experts.append(expert)
        return experts

    def forward(
        self, x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor
    ) -> torch.Tensor:
        """Sums the chosen experts' outputs.

        Args:
            x: [tokens, hidden].
            chosen: [tokens, experts per token], expert indices.
            share: [tokens, experts per token], router weights.
        """
        out = torch.zeros_like(x)
        for index, expert in enumerate(self):
            token, rank = torch.where(chosen == index)
            if len(token):
                part = expert(x[token]) * share[token, rank, None]
                out.index_add_(0, token, part.to(out.dtype))
        return out


def load_unstacked(checkpoint: Path) -> DeepseekV2ForCausalLM:
    """Loads a bf16 checkpoint for fp32 arithmetic, experts unstacked."""
    model = DeepseekV2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = UnstackedExperts.of(layer.mlp.experts)
    return model.eval().requires_grad_(False)


def quantised_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every Linear but the head and the routers, by checkpoint name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(("lm_head", "mlp.gate")):
            yield name, module
