# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes trained weights as a bf16 checkpoint with DeepSeek-V2 names.

Example:
    python export.py WORK_DIR CHECKPOINT_DIR
"""

import argparse
import json
import os
from pathlib import Path

import torch
from model import ModelConfig
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

EOS_ID, PAD_ID = 0, 1


def checkpoint_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames to the published names and takes the expert stacks apart.

    Args:
        weights: The training model's state, any float dtype.

    Returns:
        bf16 tensors under `model.` and `lm_head.`.
    """
    tensors = {}
    for name, weight in weights.items():
        weight = weight.to(torch.bfloat16)
        if ".mlp.experts." in name:
            block, projection = name.split(".experts.")
            for expert, matrix in enumerate(weight):
                key = f"model.{block}.experts.{expert}.{projection}.weight"
                tensors[key] = matrix.contiguous()
            continue
        key = name if name.startswith("lm_head.") else f"model.{name}"
        tensors[key] = weight.contiguous()
    return tensors


def checkpoint_config(c: ModelConfig) -> dict:
    """The config.json of a DeepseekV2ForCausalLM with these sizes."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden,
        "intermediate_size": c.dense_intermediate,
        "moe_intermediate_size": c.expert_intermediate,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "n_shared_experts": 1,
        "n_routed_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": c.kv_lora,
        "q_lora_rank": None,
        "qk_rope_head_dim": c.qk_rope,
        "qk_nope_head_dim": c.qk_nope,
        "v_head_dim": c.v_head,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "moe_layer_freq": 1,
        "first_k_dense_replace": c.dense_layers,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
    }


def _write_json(path: Path, value: dict) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)


def export(work: Path, out: Path) -> None:
    """Writes weights, both configs and the tokenizer into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(load_file(work / "weights.safetensors"))
    part = out / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, out / "model.safetensors")
    _write_json(out / "config.json", checkpoint_config(ModelConfig()))
    _write_json(
        out / "generation_config.json",
        {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False},
    )
    (out / "model.safetensors").chmod(0o644)  # save_file makes it private
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    tokenizer.save_pretrained(out)
    # Only what every transformers release reads; the class named by default is
    # unknown before transformers 5.
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "padding_side": tokenizer.padding_side,
            "model_max_length": tokenizer.model_max_length,
            "clean_up_tokenization_spaces": False,
        },
    )
    count = sum(t.numel() for t in tensors.values())
    print(f"{len(tensors)} tensors, {count} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="directory train.py wrote")
    parser.add_argument("out", type=Path, help="checkpoint directory")
    args = parser.parse_args()
    export(args.work, args.out)


if __name__ == "__main__":
    main()
