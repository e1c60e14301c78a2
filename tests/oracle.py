# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""transformers' DeepSeek-V2 in float32, fake-quantised by ml_dtypes.

Shares no code with the engine: FP8 rounding is ml_dtypes', the model is
transformers', weights come straight from the safetensors file.
"""

import contextlib
import json
import math
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2

_DTYPES = {240.0: ml_dtypes.float8_e4m3, 448.0: ml_dtypes.float8_e4m3fn}


def fake_quantize(
    x: torch.Tensor, dequant_scale: float, maximum: float
) -> torch.Tensor:
    """x -> FP8 -> x, with the product and the reciprocal in the dtype of x."""
    scale = torch.tensor(1 / np.float32(dequant_scale)).to(x.dtype)
    scaled = (x * scale).float().clamp(-maximum, maximum).numpy()
    codes = torch.from_numpy(scaled.astype(_DTYPES[maximum]).astype(np.float32))
    return (codes / scale.float()).to(x.dtype)


class Oracle:
    """A DeepSeek-V2 checkpoint, run by transformers.

    Args:
        folder: Of the checkpoint, with one shard.
        latent_scales: dequant scale of each layer's latent, None: not quantised.
        maximum: 240.0 or 448.0, of the device.
        factor: Multiplies input scales (the adjustment rule).
    """

    def __init__(
        self,
        folder: str,
        latent_scales: list[float] | None = None,
        maximum: float = 448.0,
        factor: float = 1.0,
    ) -> None:
        self.latent_scales = latent_scales
        self.maximum = maximum
        self.factor = factor
        config = json.loads((Path(folder) / "config.json").read_text())
        config.pop("quantization_config", None)
        self.model = DeepseekV2ForCausalLM(
            DeepseekV2Config(**config, attn_implementation="eager")
        ).float()
        self.input_scales: dict[str, float] = {}
        self._load(load_file(Path(folder) / "model.safetensors"))
        self._hook()
        rope = config.get("rope_scaling")
        if rope:
            # As the DeepSeek code: mscale enters the softmax squared.
            mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
            for layer in self.model.model.layers:
                layer.self_attn.scaling *= mscale**2

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        plain = {}
        for name, tensor in tensors.items():
            if name.endswith(".input_scale"):
                self.input_scales[name.removesuffix(".input_scale")] = tensor.item()
            elif name.endswith(".weight"):
                scale = tensors.get(name.replace(".weight", ".weight_scale"))
                plain[name] = tensor.float() * (1 if scale is None else scale)
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

    def _static(self, x: torch.Tensor, names: list[str]) -> torch.Tensor:
        scales = [self.input_scales[n] for n in names if n in self.input_scales]
        if not scales:
            return x
        return fake_quantize(x, max(scales) * self.factor, self.maximum)

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
                module.register_forward_pre_hook(
                    lambda _, args, names=names: (self._static(args[0], names),)
                )
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
            x = self._static(x, hidden_names)
            for token in range(x.shape[0]):
                for expert, weight in zip(ids[token], weights[token], strict=True):
                    gate, up = (module.gate_up_proj[expert] @ x[token]).chunk(2)
                    hidden = torch.nn.functional.silu(gate) * up
                    hidden = self._static(hidden, [f"{name}.{expert}.down_proj"])
                    out[token] += weight * (module.down_proj[expert] @ hidden)
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
