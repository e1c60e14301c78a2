# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""transformers' DeepSeek-V2 in float32, fake-quantised by ml_dtypes.

Shares no code with the engine: FP8 rounding is ml_dtypes' (tests/weight_oracle.py), the
model is transformers', weights come straight from the safetensors file.
"""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2

from tests.weight_oracle import WeightOracle, fake_quantize


class Oracle:
    """A DeepSeek-V2 checkpoint, run by transformers.

    Args:
        folder: Of the checkpoint, with one shard.
        latent_scales: dequant scale of each layer's latent, None: not quantised.
        maximum: 240.0 or 448.0, of the device.
        factor: Multiplies input scales (the adjustment rule).
        wrong: Makes a mistake with the weights, for a test of the test.
    """

    def __init__(
        self,
        folder: str,
        latent_scales: list[float] | None = None,
        maximum: float = 448.0,
        factor: float = 1.0,
        wrong: Callable[[WeightOracle], None] = lambda oracle: None,
    ) -> None:
        self.latent_scales = latent_scales
        self.maximum = maximum
        config = json.loads((Path(folder) / "config.json").read_text())
        config.pop("quantization_config", None)
        self.model = DeepseekV2ForCausalLM(
            DeepseekV2Config(**config, attn_implementation="eager")
        ).float()
        tensors = load_file(Path(folder) / "model.safetensors")
        self.weights = WeightOracle(tensors, maximum, factor, wrong)
        self._load(dict(self.weights.plain))
        self._hook()
        rope = config.get("rope_scaling")
        if rope:
            # As the DeepSeek code: mscale enters the softmax squared.
            mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
            for layer in self.model.model.layers:
                layer.self_attn.scaling *= mscale**2

    def _load(self, plain: dict[str, torch.Tensor]) -> None:
        experts = [name for name in plain if ".experts." in name]
        stacks: dict[str, list[torch.Tensor]] = {}
        for name in sorted(experts, key=lambda n: int(n.split(".experts.")[1][0])):
            block, rest = name.split(".experts.")
            kind = rest.split(".")[1]
            stacks.setdefault(f"{block}.experts.{kind}", []).append(plain.pop(name))
        for name in [n for n in stacks if n.endswith("gate_proj")]:
            block = name.removesuffix("gate_proj")
            pairs = zip(stacks[name], stacks[f"{block}up_proj"], strict=True)
            plain[f"{block}gate_up_proj"] = torch.stack([torch.cat(p) for p in pairs])
            plain[f"{block}down_proj"] = torch.stack(stacks[f"{block}down_proj"])
        self.model.load_state_dict(plain)

    def _hook(self) -> None:
        fused = {
            "gate_proj": ["gate_proj", "up_proj"],
            "up_proj": ["gate_proj", "up_proj"],
            "q_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
        }
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                parent, _, leaf = name.rpartition(".")
                parts = fused.get(leaf, [leaf])
                if leaf == "kv_a_proj_with_mqa" and hasattr(
                    self.model.get_submodule(parent), "q_a_proj"
                ):
                    parts = fused["q_a_proj"]
                names = [f"{parent}.{part}" for part in parts]
                self.weights.hook(module, names)
            if name.endswith("mlp.experts"):
                module.forward = self._experts(name, module)
        if self.latent_scales is not None:
            for layer, scale in zip(
                self.model.model.layers, self.latent_scales, strict=True
            ):
                layer.self_attn.kv_a_layernorm.register_forward_hook(
                    lambda _, __, out, s=scale: fake_quantize(out, s, self.maximum)
                )

    def _experts(self, name: str, module: torch.nn.Module):
        count = module.num_experts
        hidden_names = [
            f"{name}.{e}.{p}" for e in range(count) for p in ("gate_proj", "up_proj")
        ]

        def forward(x, ids, weights):
            out = torch.zeros_like(x)
            x = self.weights.input(x, hidden_names)
            for expert in range(count):
                tokens, slots = (ids == expert).nonzero(as_tuple=True)
                gate, up = (x[tokens] @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                hidden = torch.nn.functional.silu(gate) * up
                hidden = self.weights.input(hidden, [f"{name}.{expert}.down_proj"])
                result = hidden @ module.down_proj[expert].T
                out.index_add_(0, tokens, weights[tokens, slots, None] * result)
            return out

        return forward

    @contextlib.contextmanager
    def _quantized_rope(self):
        if self.latent_scales is None:
            yield
            return
        scales = iter(self.latent_scales)
        rotate = modeling_deepseek_v2.apply_rotary_emb

        def quantized(q, k, freqs):
            q, k = rotate(q, k, freqs)
            return q, fake_quantize(k, next(scales), self.maximum)

        with mock.patch.object(modeling_deepseek_v2, "apply_rotary_emb", quantized):
            yield

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """log P of each token given those before it, float32 [len(ids) - 1]."""
        with self._quantized_rope():
            logits = self.model(torch.tensor([ids])).logits[0, :-1]
        rows = logits.float().log_softmax(-1)
        return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    @torch.no_grad()
    def greedy(self, ids: list[int], eos: int, limit: int = 80) -> list[int]:
        """What follows a prompt, up to and without the end-of-sequence token."""
        new: list[int] = []
        while len(new) < limit:
            with self._quantized_rope():
                logits = self.model(torch.tensor([ids + new])).logits[0, -1]
            token = logits.argmax().item()
            if token == eos:
                break
            new.append(token)
        return new
