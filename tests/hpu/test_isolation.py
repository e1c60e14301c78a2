# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""NaN and inf of one sequence reach no other, nor who gets its blocks, on HPU either.

Decode sums over the blocks of a batch with a product whose zeros are for the others,
and 0 * NaN is NaN.
"""

import pytest
import torch

from tests.device_numbers import MAXIMUM
from tests.hpu.scenes import batch_of, empty_cache, format_of, random, scales
from vllm.fp8_inc.attention.mha_hpu import MHAPieces
from vllm.fp8_inc.attention.mla_hpu import MLAPieces

LENGTHS = [150, 40, 129]
SPOILED = 1  # of them
LATENT, ROPE, HEADS, SIZE = 64, 32, 4, 48


class Scene:
    """A layer, its caches full of stale rows, and what is written and asked.

    Args:
        kind: "mla" or "gqa".
        device: Whose numbers.
        contiguous: See Fp8KVCache.
        matmul: "fp8" or "bf16".
    """

    def __init__(self, kind: str, device: str, contiguous: bool, matmul: str) -> None:
        self.is_mla = kind == "mla"
        build = MLAPieces if self.is_mla else MHAPieces
        self.pieces = build(format_of(device), contiguous, matmul)
        k, v, q = (amax / MAXIMUM[device] for amax in (5, 7, 6))
        self.pieces.load_scales(scales(k) if self.is_mla else scales(k, v, q))
        self.batch = batch_of(LENGTHS, contiguous)
        row = (LATENT + ROPE,) if self.is_mla else (2, SIZE)
        count = 1 if self.is_mla else 2
        self.caches = [empty_cache(self.batch, *row) for _ in range(count)]
        tokens = len(self.batch.slots)
        self.rows = [random(tokens, *row, seed=n) for n in range(1, count + 1)]
        width = LATENT + ROPE if self.is_mla else SIZE
        self.query = random(len(LENGTHS), HEADS, width, seed=5)

    @property
    def modules(self):
        if self.is_mla:
            return [self.pieces.latent_cache]
        return [self.pieces.k_cache, self.pieces.v_cache]

    def write(self, slots: torch.Tensor, rows: list[torch.Tensor]) -> None:
        for module, cache, new in zip(self.modules, self.caches, rows, strict=True):
            module(new, cache, slots)

    def decode(self) -> torch.Tensor:
        """Writes the rows of all sequences, then attends."""
        self.write(self.batch.slots, self.rows)
        caches = [cache.unsqueeze(1) if self.is_mla else cache for cache in self.caches]
        return self.pieces.decode.forward_decode(
            query=self.query,
            key_cache=caches[0],
            value_cache=None if self.is_mla else caches[1],
            scale=SIZE**-0.5,
            kv_lora_rank=LATENT if self.is_mla else None,
            **self.batch.decode_arguments(),
        )

    def spoil(self, what: str, value: float) -> None:
        """One number of one token of a sequence, of q or of what is cached."""
        if what == "q":
            self.query[SPOILED, 2, 3] = value
            return
        token = sum(LENGTHS[:SPOILED]) + 17
        rows = self.rows[-1] if what == "v" else self.rows[0]
        rows[token].view(-1)[3] = value  # of a latent: of K and V


@pytest.fixture(params=["mla", "gqa"])
def kind(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["listed", "contiguous"])
def contiguous(request):
    return request.param


@pytest.fixture
def others():
    return [n for n in range(len(LENGTHS)) if n != SPOILED]


@pytest.mark.parametrize("matmul", ["fp8", "bf16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_no_other_sequence(kind, device, contiguous, matmul, what, value, others):
    expected = Scene(kind, device, contiguous, matmul).decode()
    assert expected.isfinite().all()
    scene = Scene(kind, device, contiguous, matmul)
    scene.spoil(what, value)
    found = scene.decode()
    assert torch.equal(found[others], expected[others])
    if what != "v" and value != value:  # V of MHA has no room for a mark
        assert found[SPOILED].isnan().any()


def test_a_spoiled_sequence_is_spoiled_in_the_heads_that_read_it(device):
    """K of one KV head is read by half of the heads; a latent by all."""
    for kind, heads in (("gqa", [0, 1]), ("mla", range(HEADS))):
        scene = Scene(kind, device, False, "fp8")
        scene.spoil("k", torch.nan)
        nan = scene.decode()[SPOILED].isnan()
        assert nan[list(heads)].all() and nan.any(-1).sum() == len(heads)


@pytest.mark.parametrize("matmul", ["fp8", "bf16"])
def test_freed_blocks(kind, device, contiguous, matmul):
    """All of the cache was NaN; padding and the rests of blocks still are."""
    expected = Scene(kind, device, contiguous, matmul).decode()
    scene = Scene(kind, device, contiguous, matmul)
    slots = torch.arange(scene.caches[0].shape[0])
    stale = [torch.full_like(rows[:1], torch.nan) for rows in scene.rows]
    scene.write(slots, [row.expand(len(slots), *row.shape[1:]) for row in stale])
    assert torch.equal(scene.decode(), expected)


def test_the_context_of_a_prefill(kind, device):
    """A mask that is added does not hide NaN."""
    scene = Scene(kind, device, False, "fp8")
    scene.spoil("k", torch.nan)
    scene.write(scene.batch.slots, scene.rows)
    for module, cache in zip(scene.modules, scene.caches, strict=True):
        blocks = cache.unflatten(0, (-1, 128))
        context = module.fetch_from_cache(blocks, scene.batch.block_list)
        assert context.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_prompts_of_one_prefill(device, value):
    """K and V of MLA are cast by an amax over all prompts."""
    pieces = MLAPieces(format_of(device), False)
    pieces.load_scales(scales(5 / MAXIMUM[device]))
    q, k, v = (random(3, HEADS, 20, SIZE, seed=n) for n in (6, 7, 8))

    def attend():
        return pieces.prompt(q, k, v, None, 0.0, True, 0.1, "fast", True, None, "right")

    for x in (q, k, v):
        x[SPOILED] *= 0.5  # whose amax is that of another prompt
    expected = attend()
    for x in (q, k, v):
        x[SPOILED, 1, 4, 5] = value
    found = attend()
    others = [0, 2]
    assert expected.isfinite().all() and torch.equal(found[others], expected[others])
