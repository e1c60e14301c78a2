# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A DeepSeek checkpoint whose latent has another range, and the same results.

The cached row is [kv_c, k_pe]. kv_c times 2^a: kv_a_layernorm's weight times 2^a,
kv_b_proj's times 2^-a. k_pe times 2^b: its rows of kv_a_proj_with_mqa times 2^b, the
rope part of q_proj times 2^-b. Powers of two change exponents alone, so that every
result with a bf16 cache stays the same bit for bit.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Rescaling:
    """Exponents of two, one a layer.

    Attributes:
        kv_c: Of the normalised latent.
        k_pe: Of the rotary key.
    """

    kv_c: tuple[int, ...]
    k_pe: tuple[int, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether every cached value has the same exponent."""
        return len({*self.kv_c, *self.k_pe}) == 1


def rescale(source: Path, out: Path, rescaling: Rescaling) -> Path:
    """Writes the checkpoint.

    Args:
        source: A bf16 checkpoint without q_lora, in one shard.
        out: A folder that is not there yet.
        rescaling: For each of its layers.

    Raises:
        ValueError: If an exponent leaves bf16's range, or layers and exponents
            differ in number.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    if not len(rescaling.kv_c) == len(rescaling.k_pe) == layers:
        raise ValueError(f"{source} has {layers} layers; {rescaling} fits another")
    tensors = load_file(source / "model.safetensors")
    rope = config["qk_rope_head_dim"]
    for n, (a, b) in enumerate(zip(rescaling.kv_c, rescaling.k_pe)):
        layer = f"model.layers.{n}.self_attn"
        _times(tensors, f"{layer}.kv_a_layernorm.weight", a)
        _times(tensors, f"{layer}.kv_b_proj.weight", -a)
        _times(tensors, f"{layer}.kv_a_proj_with_mqa.weight", b, tail=rope)
        heads = config["num_attention_heads"]
        _times(tensors, f"{layer}.q_proj.weight", -b, tail=rope, heads=heads)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _times(
    tensors: dict[str, torch.Tensor],
    key: str,
    exponent: int,
    tail: int | None = None,
    heads: int = 1,
) -> None:
    """Multiplies the last ``tail`` rows of each head, or all, by 2^exponent."""
    before = tensors[key]
    after = before.unflatten(0, (heads, -1)).clone()
    after[:, -(tail or after.shape[1]) :] *= 2.0**exponent
    after = after.view_as(before)
    back = after.unflatten(0, (heads, -1)).clone()
    back[:, -(tail or back.shape[1]) :] *= 2.0**-exponent
    if not torch.equal(back.view_as(before), before):
        raise ValueError(f"{key} times 2^{exponent} does not fit {before.dtype}")
    tensors[key] = after
