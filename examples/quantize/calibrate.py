# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Largest absolute values over calibration texts: Linear inputs and the latent."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from transformers import DeepseekV2ForCausalLM, PreTrainedTokenizerFast
from unstacked import quantised_linears


@dataclass
class Ranges:
    """Largest absolute values, each the maximum over every text.

    Attributes:
        inputs: Of each Linear's input, by module name.
        kv_c: Of each layer's latent after kv_a_layernorm.
        k_pe: Of each layer's rotary key after the rotation.
        tokens: Number of tokens seen.
    """

    inputs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kv_c: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    k_pe: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tokens: int = 0


def _raise_to(store: dict, key: str | int, x: torch.Tensor) -> None:
    store[key] = max(store[key], x.abs().max().item())


def measure(
    model: DeepseekV2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
) -> Ranges:
    """Runs every text once, alone, so that no padding is measured.

    Args:
        model: From load_unstacked.
        tokenizer: The model's tokenizer.
        texts: Cut at the model's last position.

    Returns:
        The ranges. A Linear that no token reached has none.
    """
    ranges, hooks = Ranges(), []
    for name, linear in quantised_linears(model):

        def see_input(module, args, name=name):
            _raise_to(ranges.inputs, name, args[0])

        hooks.append(linear.register_forward_pre_hook(see_input))
    for index, layer in enumerate(model.model.layers):

        def see_latent(module, args, output, index=index):
            _raise_to(ranges.kv_c, index, output)

        norm = layer.self_attn.kv_a_layernorm
        hooks.append(norm.register_forward_hook(see_latent))

    nope = model.config.qk_nope_head_dim
    for text in texts:
        ids = tokenizer(
            text,
            return_tensors="pt",
            truncation=True,
            max_length=model.config.max_position_embeddings,
        )["input_ids"]
        with torch.inference_mode():
            cache = model(ids, use_cache=True).past_key_values
        # transformers caches expanded keys: [k_nope, rotated k_pe] of each head,
        # k_pe being the same for all heads.
        for index, layer in enumerate(cache.layers):
            _raise_to(ranges.k_pe, index, layer.keys[:, 0, :, nope:])
        ranges.tokens += ids.shape[1]
    for hook in hooks:
        hook.remove()
    return ranges
