# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes tiny random checkpoints, with every knob a test wants to turn."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 128
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def deepseek_config(**changes: Any) -> dict[str, Any]:
    """config.json of an MLA + MoE model."""
    return _DEEPSEEK | changes


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of a GQA model."""
    return _LLAMA | changes


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random bf16 weights with the names of the Hugging Face checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        values = torch.randn(rows, columns, generator=generator) / columns**0.5
        tensors[f"{name}.weight"] = values.bfloat16()

    def norm(name: str, size: int) -> None:
        values = 1 + 0.2 * torch.randn(size, generator=generator)
        tensors[f"{name}.weight"] = values.bfloat16()

    def mlp(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", width, hidden)
        linear(f"{name}.up_proj", width, hidden)
        linear(f"{name}.down_proj", hidden, width)

    hidden = config["hidden_size"]
    tensors["model.embed_tokens.weight"] = torch.randn(
        config["vocab_size"], hidden, generator=generator
    ).bfloat16()
    tensors["lm_head.weight"] = (
        torch.randn(config["vocab_size"], hidden, generator=generator) * 4 / hidden**0.5
    ).bfloat16()
    norm("model.norm", hidden)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        heads = config["num_attention_heads"]
        if config["model_type"] == "llama":
            size, kv_heads = config["head_dim"], config["num_key_value_heads"]
            linear(f"{layer}.self_attn.q_proj", heads * size, hidden)
            linear(f"{layer}.self_attn.k_proj", kv_heads * size, hidden)
            linear(f"{layer}.self_attn.v_proj", kv_heads * size, hidden)
            linear(f"{layer}.self_attn.o_proj", hidden, heads * size)
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
        if config["q_lora_rank"] is None:
            linear(f"{layer}.self_attn.q_proj", heads * (nope + rope), hidden)
        else:
            rank = config["q_lora_rank"]
            linear(f"{layer}.self_attn.q_a_proj", rank, hidden)
            norm(f"{layer}.self_attn.q_a_layernorm", rank)
            linear(f"{layer}.self_attn.q_b_proj", heads * (nope + rope), rank)
        linear(f"{layer}.self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
        norm(f"{layer}.self_attn.kv_a_layernorm", latent)
        linear(f"{layer}.self_attn.kv_b_proj", heads * (nope + v), latent)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * v)
        if n < config["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        linear(f"{layer}.mlp.gate", config["n_routed_experts"], hidden)
        for expert in range(config["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        mlp(
            f"{layer}.mlp.shared_experts",
            config["moe_intermediate_size"] * config["n_shared_experts"],
        )
    return tensors


def kv_scales(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """k, v and q scales that differ for each layer and from each other."""
    scales = {}
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}.self_attn"
        scales[f"{layer}.k_scale"] = torch.tensor([0.011 + 0.005 * n])
        scales[f"{layer}.v_scale"] = torch.tensor([0.031 + 0.007 * n])
        scales[f"{layer}.q_scale"] = torch.tensor([0.023 + 0.003 * n])
    return scales


def quantization_config(**changes: Any) -> dict[str, Any]:
    """compressed-tensors W8A8 FP8 static, with an FP8 KV scheme."""
    fp8 = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": dict(fp8),
                "input_activations": dict(fp8),
            }
        },
        "kv_cache_scheme": dict(fp8),
    } | changes


def fp8_config(static: bool = False, **changes: Any) -> dict[str, Any]:
    """quant_method fp8, as AutoFP8 and the official DeepSeek checkpoints write it."""
    scheme = "static" if static else "dynamic"
    return {"quant_method": "fp8", "activation_scheme": scheme} | changes


def quantize(
    tensors: dict[str, torch.Tensor],
    maximum: float = 448.0,
    per_channel: bool = False,
    static: bool = True,
) -> dict[str, torch.Tensor]:
    """Makes every projection FP8, with an unequal input_scale for each if static."""
    result: dict[str, torch.Tensor] = {}
    for count, (name, tensor) in enumerate(tensors.items()):
        if "_proj" not in name or not name.endswith(".weight"):
            result[name] = tensor
            continue
        amax = tensor.float().abs()
        amax = amax.amax(1, keepdim=True) if per_channel else amax.amax().view(1)
        scale = amax / maximum
        codes = (tensor.float() / scale).clamp(-maximum, maximum)
        result[name] = codes.to(torch.float8_e4m3fn)
        result[name.replace(".weight", ".weight_scale")] = scale
        if static:
            result[name.replace(".weight", ".input_scale")] = torch.tensor(
                [(6 + count % 5) / maximum]
            )
    return result


def quantize_blocks(
    tensors: dict[str, torch.Tensor], block: int = 128
) -> dict[str, torch.Tensor]:
    """Makes every projection FP8 with a scale for each block, as DeepSeek-V3's.

    Blocks of one weight get amplitudes that differ, so that a wrong one shows.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" not in name or not name.endswith(".weight"):
            result[name] = tensor
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        steps = 2.0 ** ((torch.arange(rows)[:, None] + torch.arange(columns)) % 3 - 1)

        def widen(scale: torch.Tensor, shape: torch.Size = tensor.shape):
            wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            return wide[: shape[0], : shape[1]]

        values = tensor.float() * widen(steps)
        padded = torch.zeros(rows * block, columns * block)
        padded[: tensor.shape[0], : tensor.shape[1]] = values.abs()
        scale = padded.view(rows, block, columns, block).amax((1, 3)) / 448
        codes = (values / widen(scale)).clamp(-448, 448)
        result[name] = codes.to(torch.float8_e4m3fn)
        result[f"{name}_scale_inv"] = scale
    return result


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> str:
    """Writes config.json and one shard; returns the folder for the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


BUILDERS = {"mla": deepseek_config, "gqa": llama_config}


def checkpoint(
    folder: Path,
    kind: str,
    scales: dict[str, torch.Tensor] | None = None,
    **quantization: Any,
) -> str:
    """bf16 weights and KV scales, with a kv_cache_scheme that declares them."""
    config = BUILDERS[kind]()
    config["quantization_config"] = quantization_config(
        config_groups={}, **quantization
    )
    scales = kv_scales(config) if scales is None else scales
    return write(folder, config, weights(config) | scales)


def fp8_static(folder: Path, kind: str, factor: float = 1) -> str:
    """FP8-static weights; ``factor`` multiplies the KV scales."""
    config = BUILDERS[kind]()
    config["quantization_config"] = quantization_config()
    scales = {key: scale * factor for key, scale in kv_scales(config).items()}
    return write(folder, config, quantize(weights(config)) | scales)
