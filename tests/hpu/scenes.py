# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Paged FP8 caches as the HPU worker lays them out, and attention over them."""

from dataclasses import dataclass

import torch

from tests import device_numbers
from tests.device_numbers import MAXIMUM, to_numpy
from vllm.fp8_inc.attention.hpu_cache import Fp8KVCache
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.scales import AttentionScales, StaticScale

FP8 = torch.float8_e4m3fn
BLOCK = 128


def static(value: float | list[float]) -> StaticScale:
    """A scale per tensor, or per head, as the loader would build it."""
    if not isinstance(value, list):
        return StaticScale.from_dequant(value, torch.bfloat16)
    each = [static(v) for v in value]
    return StaticScale(
        torch.stack([s.quant_scale for s in each]),
        torch.stack([s.dequant_scale for s in each]),
    )


def scales(k, v=None, q=None, prob=None) -> AttentionScales:
    """Unequal scales of a layer; MLA gives k alone."""
    return AttentionScales(
        static(k),
        static(k if v is None else v),
        None if q is None else static(q),
        "test",
        None if prob is None else static(prob),
    )


@dataclass
class Batch:
    """Which blocks each sequence has, in the form of the worker's metadata.

    Attributes:
        lengths: Tokens of each sequence.
        tables: Its block ids.
        block_list: Those of the decode, padding included.
        slots: The slot of every token, sequence after sequence.
    """

    lengths: list[int]
    tables: list[list[int]]
    block_list: torch.Tensor
    block_groups: torch.Tensor
    block_mapping: torch.Tensor
    block_bias: torch.Tensor
    slots: torch.Tensor
    num_blocks: int

    def decode_arguments(self) -> dict:
        return {
            "block_list": self.block_list,
            "block_groups": self.block_groups,
            "block_mapping": self.block_mapping,
            "block_bias": self.block_bias,
            "block_size": BLOCK,
        }


def batch_of(lengths: list[int], contiguous: bool, padding: int = 2) -> Batch:
    """Scatters the blocks of the sequences over the cache.

    Args:
        lengths: Tokens of each sequence.
        contiguous: Whether entry i of the decode's lists is block i of the cache
            (contiguous PA), or the blocks follow sequence by sequence.
        padding: Blocks that no sequence has.
    """
    counts = [-(-length // BLOCK) for length in lengths]
    total = sum(counts) + padding
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    entries = [
        (block, group, min(BLOCK, lengths[group] - position * BLOCK))
        for group, table in enumerate(tables)
        for position, block in enumerate(table)
    ]
    if contiguous:
        by_id = {entry[0]: entry for entry in entries}
        entries = [by_id.get(block, (block, -1, 1)) for block in range(total)]
    else:
        entries += [(0, -1, 1)] * padding
    blocks, groups, usage = (torch.tensor(column) for column in zip(*entries))
    mapping = torch.zeros(len(entries), len(lengths)).bfloat16()
    real = groups >= 0
    mapping[real, groups[real]] = 1
    hidden = torch.arange(BLOCK) >= usage[:, None]
    bias = torch.zeros(hidden.shape).bfloat16().masked_fill(hidden, -torch.inf)
    slots = [
        table[i // BLOCK] * BLOCK + i % BLOCK
        for length, table in zip(lengths, tables)
        for i in range(length)
    ]
    return Batch(
        lengths, tables, blocks, groups, mapping, bias, torch.tensor(slots), total
    )


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def empty_cache(batch: Batch, *shape: int) -> torch.Tensor:
    """An FP8 cache [slots, *shape] with stale numbers, as after other requests."""
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(
        0, 0x70, (batch.num_blocks * BLOCK, *shape), generator=generator
    )
    return codes.to(torch.uint8).view(FP8)


def written_cache(rows: torch.Tensor, scale: StaticScale, batch: Batch) -> torch.Tensor:
    """An FP8 cache with the rows of a batch, written by our writer."""
    module = Fp8KVCache(use_contiguous_pa=False)
    module.scale.load(scale)
    return module(rows, empty_cache(batch, *rows.shape[1:]), batch.slots)


def cached_values(
    batch: Batch, cache: torch.Tensor, dequant_scale: torch.Tensor, device: str
) -> list[torch.Tensor]:
    """What each sequence has cached, decoded by ml_dtypes: float32 [tokens, ...]."""
    values = device_numbers.decode(to_numpy(cache[batch.slots]), device)
    wide = torch.from_numpy(values).float()
    shape = (-1, 1) if dequant_scale.dim() else ()
    wide = wide * dequant_scale.view(shape)
    return list(wide.split(batch.lengths))


def attention(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """float32 attention of one query a sequence.

    Args:
        query: [batch, heads, dim].
        keys: Of each sequence, [tokens, kv_heads, dim].
        values: [tokens, kv_heads, value_dim].
        scale: Multiplies the logits.

    Returns:
        float32 [batch, heads, value_dim].
    """
    rows = []
    for q, k, v in zip(query.float(), keys, values):
        group = q.shape[0] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = (torch.einsum("hd,thd->ht", q, k) * scale).softmax(-1)
        rows.append(torch.einsum("ht,thd->hd", weights, v))
    return torch.stack(rows)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((out.float() - expected).norm() / expected.norm()).item()


def format_of(device: str):
    return FORMATS[device]


def on_grid(
    query: torch.Tensor, device: str, dequant_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """What the query is after its cast, float32, by ml_dtypes.

    Args:
        query: bfloat16 [batch, heads, dim].
        device: Whose cast.
        dequant_scale: Static, 0-d or [heads]; None: of each row by its amax.
    """
    if dequant_scale is None:
        amax = query.abs().amax(-1, keepdim=True)
        quant_scale = 1 / ((amax + 1e-8) / MAXIMUM[device])
    else:
        shape = (-1, 1) if dequant_scale.dim() else ()
        quant_scale = (1 / dequant_scale).view(shape).bfloat16()
    product = to_numpy(query) * to_numpy(quant_scale.expand(query.shape))
    codes = device_numbers.encode(product, device)
    values = torch.from_numpy(device_numbers.decode(codes, device))
    return values.float() / quant_scale.float()
