# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Compares an FP8 checkpoint with its bf16 source, on the same questions.

Example:
    PYTHONPATH=../train python check.py ../tiny-deepseek-v2 ../tiny-deepseek-v2-fp8

The FP8 numbers are computed in fp32 on values rounded to FP8 codes: weights,
inputs of Linears, and the cached latent row. The error of real FP8 products, which
accumulate in fp32, is the same.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from evaluate import evaluation_set, generate
from flavours import FLAVOURS, Flavour, from_codes, to_codes
from problems import grade
from safetensors.torch import load_file
from transformers import AutoTokenizer, DeepseekV2ForCausalLM
from transformers.cache_utils import DynamicCache
from unstacked import load_unstacked, quantised_linears


class LatentKeyCache(DynamicCache):
    """Rounds the rotary part of every key, as a cache of latent rows holds it.

    Args:
        nope: Size of a key's part without rotation.
        scales: Each layer's dequant scale, [1].
        flavour: The range of the codes.
    """

    def __init__(self, nope: int, scales: list[torch.Tensor], flavour: Flavour):
        super().__init__()
        self._nope, self._scales, self._flavour = nope, scales, flavour

    def update(self, keys, values, layer, *args, **kwargs):
        keys = keys.clone()
        scale = self._scales[layer]
        k_pe = to_codes(keys[..., self._nope :], scale, self._flavour)
        keys[..., self._nope :] = from_codes(k_pe, scale)
        return super().update(keys, values, layer, *args, **kwargs)


def flavour_of(checkpoint: Path) -> Flavour:
    """The flavour a checkpoint's config.json declares.

    Raises:
        ValueError: It declares none that is known.
    """
    path = checkpoint / "config.json"
    config = json.loads(path.read_text()).get("quantization_config", {})
    name = config.get("fp8_dtype_flavor")
    for flavour in FLAVOURS.values():
        if flavour.config_name == name:
            return flavour
    raise ValueError(f"{path}: quantization_config.fp8_dtype_flavor is {name!r}")


def apply_fp8(
    model: DeepseekV2ForCausalLM, checkpoint: Path
) -> Callable[[], LatentKeyCache]:
    """Gives a model the FP8 checkpoint's weights and rounds what FP8 rounds.

    Args:
        model: From load_unstacked; changed in place.
        checkpoint: The FP8 checkpoint's directory.

    Returns:
        What makes a cache for one call of generate.
    """
    path, flavour = checkpoint / "model.safetensors", flavour_of(checkpoint)
    tensors = load_file(path)
    for name, linear in quantised_linears(model):
        codes = tensors[f"{name}.weight"]
        if codes.float().abs().max() > flavour.largest:
            raise ValueError(f"{path}: {name}.weight has codes over {flavour.largest}")
        linear.weight.data = from_codes(codes, tensors[f"{name}.weight_scale"])

        def round_input(module, args, scale=tensors[f"{name}.input_scale"]):
            return (from_codes(to_codes(args[0], scale, flavour), scale),)

        # kv_b_proj reads the cache, whose own rounding is below.
        if not name.endswith("kv_b_proj"):
            linear.register_forward_pre_hook(round_input)
    scales = []
    for index, layer in enumerate(model.model.layers):
        key = f"model.layers.{index}.self_attn"
        # One row, one scale: a latent cache takes the larger.
        scale = torch.maximum(tensors[f"{key}.k_scale"], tensors[f"{key}.v_scale"])

        def round_latent(module, args, output, scale=scale):
            return from_codes(to_codes(output, scale, flavour), scale)

        layer.self_attn.kv_a_layernorm.register_forward_hook(round_latent)
        scales.append(scale)
    return lambda: LatentKeyCache(model.config.qk_nope_head_dim, scales, flavour)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="bf16 checkpoint directory")
    parser.add_argument("quantised", type=Path, help="FP8 checkpoint directory")
    parser.add_argument("--shots", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=12345)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.source)
    reference, model = load_unstacked(args.source), load_unstacked(args.source)
    make_cache = apply_fp8(model, args.quantised)
    for shots in args.shots:
        prompts, problems = evaluation_set(tokenizer, shots, args.count, args.seed)
        before = generate(reference, tokenizer, prompts)
        after = generate(model, tokenizer, prompts, make_cache)
        right = [
            (grade(a, p.answer), grade(b, p.answer))
            for a, b, p in zip(before, after, problems, strict=True)
        ]
        same = sum(a == b for a, b in zip(before, after, strict=True))
        print(
            f"{shots:2d} shots, n {args.count}, seed {args.seed}: "
            f"bf16 {sum(a for a, _ in right)} right, FP8 {sum(b for _, b in right)}; "
            f"lost {sum(a and not b for a, b in right)}, "
            f"won {sum(b and not a for a, b in right)}; same text {same}",
            flush=True,
        )


if __name__ == "__main__":
    main()
