# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""How much room the KV cache of a model takes, and how many tokens a Gaudi holds."""

from collections.abc import Iterator

from vllm.fp8_inc.sources.folder import Folder

# Bytes of device memory, as Intel's data sheets have them.
MEMORY = {"gaudi2": 96 * 10**9, "gaudi3": 128 * 10**9}
_USED = 0.9  # of it, vLLM's default for --gpu-memory-utilization
_CARDS = (1, 2, 4, 8)
_CONTEXTS = (4096, 32768, 131072)
_DTYPES = (("bf16", 2), ("fp8_inc", 1))


def bytes_per_token(folder: Folder, element: int, cards: int = 1) -> int:
    """Size of what one token leaves in the caches of all layers of one card.

    MLA: latent + rope of one row, on every card. MHA and GQA: K and V of the KV heads
    of a card, at least one. Scales add nothing, being one a layer or a head.

    Args:
        folder: The checkpoint.
        element: Bytes of a cached number: 1 for FP8, 2 for bfloat16.
        cards: Tensor-parallel ranks.

    Raises:
        ValueError: Naming what config.json lacks.
    """
    layers = len(folder.attention_layers)
    if folder.is_mla:
        row = folder.size("kv_lora_rank") + folder.size("qk_rope_head_dim")
        return layers * row * element
    heads = folder.size("num_attention_heads")
    kv_heads = folder.text_config.get("num_key_value_heads") or heads
    size = folder.text_config.get("head_dim") or folder.size("hidden_size") // heads
    if size < 1:
        raise ValueError(
            f"{folder.path}/config.json: hidden_size {folder.size('hidden_size')} is "
            f"smaller than num_attention_heads {heads}. Copy or download it again"
        )
    return layers * 2 * -(-kv_heads // cards) * size * element


def tokens(folder: Folder, device: str, element: int) -> tuple[int, int] | None:
    """The fewest cards that hold the weights, and how many tokens they have room for.

    An upper bound: activations, graphs and what the driver keeps are not counted, nor
    weights that a rank keeps whole.

    Args:
        folder: The checkpoint, whose files are the size of its weights.
        device: gaudi2 or gaudi3.
        element: Bytes of a cached number.

    Returns:
        Cards and tokens, or None where eight cards do not hold the weights.
    """
    weights = sum(path.stat().st_size for path in folder.shards)
    for cards in _CARDS:
        room = int(_USED * MEMORY[device]) - weights // cards
        if room > 0:
            return cards, room // bytes_per_token(folder, element, cards)
    return None


def capacity_lines(folder: Folder) -> list[str]:
    """The sizes, for a person."""
    lines = []
    for name, element in _DTYPES:
        size = bytes_per_token(folder, element)
        lines.append(
            f"capacity, {name}: {size:,} bytes a token, {2**30 // size:,} tokens a GiB "
            + ("(on each rank)" if folder.is_mla else "(over all ranks)")
        )
    lines += [line for device in MEMORY for line in _device_lines(folder, device)]
    return lines


def _device_lines(folder: Folder, device: str) -> Iterator[str]:
    longest = folder.text_config.get("max_position_embeddings")
    if type(longest) is not int or longest < 1:
        longest = _CONTEXTS[-1]
    contexts = [n for n in _CONTEXTS if n <= longest] or [longest]
    for name, element in _DTYPES:
        found = tokens(folder, device, element)
        if found is None:
            yield f"capacity, {device}: {_CARDS[-1]} cards do not hold the weights"
            return
        cards, number = found
        sequences = ", ".join(f"{number // n:,} of {n:,}" for n in contexts)
        yield (
            f"capacity, {device} x {cards}, {name}: at most {number:,} tokens; "
            f"sequences: {sequences}"
        )
