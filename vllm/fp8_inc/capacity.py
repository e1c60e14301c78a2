# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""How much room the KV cache of a model takes."""

from vllm.fp8_inc.sources.folder import Folder


def bytes_per_token(folder: Folder, element: int) -> int:
    """Size of what one token leaves in the caches of all layers.

    MLA: latent + rope of one row. MHA and GQA: K and V of each KV head. Scales add
    nothing, being one a layer or a head.

    Args:
        folder: The checkpoint.
        element: Bytes of a cached number: 1 for FP8, 2 for bfloat16.
    """
    text, layers = folder.text_config, len(folder.attention_layers)
    if folder.is_mla:
        row = text["kv_lora_rank"] + text["qk_rope_head_dim"]
        return layers * row * element
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    size = text.get("head_dim") or text["hidden_size"] // heads
    return layers * 2 * kv_heads * size * element


def capacity_lines(folder: Folder) -> list[str]:
    """The sizes on one device, for a person."""
    lines = []
    for name, element in (("bf16", 2), ("fp8_inc", 1)):
        size = bytes_per_token(folder, element)
        lines.append(
            f"capacity, {name}: {size:,} bytes a token, {2**30 // size:,} tokens a GiB "
            + ("(on each rank)" if folder.is_mla else "(over all ranks)")
        )
    return lines
