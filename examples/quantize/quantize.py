# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Makes a W8A8 FP8 checkpoint with KV cache scales from a bf16 DeepSeek-V2 one.

Example:
    python quantize.py ../tiny-deepseek-v2 ../tiny-deepseek-v2-fp8 \
        --texts ../calibration-texts.jsonl --flavour 240

The format is compressed-tensors' float-quantized: static scales per tensor for
every Linear, kv_b_proj and experts included, but not the head and the routers.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
from calibrate import Ranges, measure
from flavours import FLAVOURS, PER_TENSOR, Flavour, dequant_scale, to_codes
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from unstacked import load_unstacked

WEIGHTS = "model.safetensors"
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def read_texts(path: Path) -> list[str]:
    """Reads one text per line.

    Raises:
        ValueError: A line is not a JSON object with a "text", or none is there.
    """
    texts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            texts.append(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: expected {{"text": "..."}}'
            ) from error
    if not texts:
        raise ValueError(f"{path}: no texts")
    return texts


def quantised_tensors(
    source: Path, ranges: Ranges, flavour: Flavour
) -> dict[str, torch.Tensor]:
    """Replaces every calibrated Linear's weight by codes and scales.

    Args:
        source: The bf16 checkpoint's weight file.
        ranges: From measure().
        flavour: The range of the codes.

    Returns:
        All tensors of the new checkpoint. `weight` is float8_e4m3fn; each scale
        is [1] fp32 and a dequant multiplier.

    Raises:
        ValueError: A weight is missing or has no usable range; names the key.
    """
    tensors = load_file(source)
    linears = [
        key.removesuffix(".weight")
        for key in tensors
        if key.endswith("_proj.weight") or key.endswith("_with_mqa.weight")
    ]
    missing = set(ranges.inputs) - set(linears)
    if missing:
        raise ValueError(f"{source}: no weight for {', '.join(sorted(missing))}")
    for name in linears:
        key = f"{name}.weight"
        weight = tensors[key].float()
        scale = dequant_scale(weight.abs().max().item(), flavour, f"{source}: {key}")
        tensors[key] = to_codes(weight, scale, flavour)
        tensors[f"{name}.weight_scale"] = scale
        tensors[f"{name}.input_scale"] = dequant_scale(
            ranges.inputs[name], flavour, f"input of {name}"
        )
    for index, kv_c in ranges.kv_c.items():
        layer = f"model.layers.{index}.self_attn"
        # What is cached is one row [kv_c, k_pe] under one scale, hence the maximum.
        row = max(kv_c, ranges.k_pe[index])
        for name, amax in (("k_scale", row), ("v_scale", kv_c)):
            key = f"{layer}.{name}"
            tensors[key] = dequant_scale(amax, flavour, key)
    return tensors


def quantisation_config(flavour: Flavour) -> dict:
    """The quantization_config of config.json."""
    args = PER_TENSOR.model_dump(
        mode="json",
        include={"num_bits", "type", "strategy", "symmetric", "dynamic"},
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": args,
                "input_activations": args,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": args,
        # Which range the scales were made for; without it a reader must guess.
        "fp8_dtype_flavor": flavour.config_name,
    }


def write_checkpoint(
    source: Path, out: Path, tensors: dict[str, torch.Tensor], flavour: Flavour
) -> None:
    """Writes the files beside their final names, then renames each."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantisation_config(flavour)
    parts = {name: out / f"{name}.part" for name in (WEIGHTS, "config.json", *COPIED)}
    save_file(tensors, parts[WEIGHTS], metadata={"format": "pt"})
    parts["config.json"].write_text(json.dumps(config, indent=2) + "\n")
    for name in COPIED:
        shutil.copyfile(source / name, parts[name])
    parts[WEIGHTS].chmod(0o644)  # save_file makes it private
    for name, part in parts.items():
        os.replace(part, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="bf16 checkpoint directory")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines file")
    parser.add_argument("--flavour", choices=sorted(FLAVOURS), default="240")
    args = parser.parse_args()
    flavour = FLAVOURS[args.flavour]
    tokenizer = AutoTokenizer.from_pretrained(args.source)
    model = load_unstacked(args.source)
    texts = read_texts(args.texts)
    ranges = measure(model, tokenizer, texts)
    tensors = quantised_tensors(args.source / WEIGHTS, ranges, flavour)
    write_checkpoint(args.source, args.out, tensors, flavour)
    print(f"{len(texts)} texts, {ranges.tokens} tokens")
    for index in ranges.kv_c:
        print(
            f"layer {index}: amax kv_c {ranges.kv_c[index]:.3f}, "
            f"k_pe {ranges.k_pe[index]:.3f}"
        )


if __name__ == "__main__":
    main()
