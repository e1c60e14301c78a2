# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Defects of the HPU worker's decode and prefill, each beside ours.

Each test shows a defect on a minimal model of vllm-gaudi 091bbadd
(benchmarks/hpu_worker.py) and its absence in our pieces. Numbered as in docs/hpu.md;
the others are in test_defects_scales.py.
"""

import pytest
import torch

from benchmarks.hpu_worker import WorkerCache, WorkerDecode, WorkerMatmul
from tests.device_numbers import MAXIMUM
from tests.hpu.scenes import (
    BLOCK,
    FP8,
    attention,
    batch_of,
    cached_values,
    format_of,
    random,
    relative_error,
    scales,
    static,
    written_cache,
)
from vllm.fp8_inc.attention.mla_hpu import MLAPieces

LATENT, ROPE, HEADS = 512, 64, 4
SCALE = 0.08


class Latent:
    """An MLA layer on both sides: one cache, one query, and what is right."""

    def __init__(self, device, lengths, latent=None, query=None, contiguous=False):
        self.scale = static(5 / MAXIMUM[device])
        self.batch = batch_of(lengths, contiguous)
        rows = random(len(self.batch.slots), LATENT + ROPE, seed=1)
        rows = rows if latent is None else latent
        self.query = random(len(lengths), HEADS, LATENT + ROPE, seed=2)
        self.query = self.query if query is None else query
        self.cache = written_cache(rows, self.scale, self.batch)
        dequant = self.scale.dequant_scale
        keys = cached_values(self.batch, self.cache, dequant, device)
        self.keys = [k[:, None] for k in keys]
        values = [k[..., :LATENT] for k in self.keys]
        self.expected = attention(self.query, self.keys, values, SCALE)
        self.pieces = MLAPieces(format_of(device), contiguous)
        self.pieces.load_scales(scales(5 / MAXIMUM[device]))
        quant = self.scale.quant_scale.float().item()
        q_quant = MAXIMUM[device] / max(self.query.abs().max().item(), 1.0)
        self.worker = WorkerDecode.fp8(q_quant / SCALE, quant, quant, contiguous, True)

    def arguments(self):
        return {
            "query": self.query,
            "key_cache": self.cache[:, None],
            "value_cache": None,
            "scale": SCALE,
            "kv_lora_rank": LATENT,
            **self.batch.decode_arguments(),
        }

    def error(self, decode):
        return relative_error(decode(**self.arguments()), self.expected)


def test_3_the_context_of_a_prefill_is_fetched_by_id(device):
    latent = Latent(device, [300, 200], contiguous=True)
    blocks = torch.tensor(latent.batch.tables[0])
    rows = latent.cache.unflatten(0, (-1, BLOCK))
    right = latent.keys[0][:, 0]
    worker = WorkerCache(latent.scale.quant_scale.float(), contiguous=True)
    ours = latent.pieces.latent_cache
    assert ours.use_contiguous_pa
    wrong = worker.fetch(rows, blocks).flatten(0, 1)[:300]
    assert relative_error(wrong, right) > 0.5
    fetched = ours.fetch_from_cache(rows, blocks).flatten(0, 1)[:300]
    assert relative_error(fetched, right) < 2**-8
    decoded = ours.fetch_codes(rows, latent.batch.block_list)
    assert decoded.data_ptr() == rows.data_ptr()  # and decode copies nothing
    ours._fetch_by_id = True  # as the worker says of a sliding window's blocks
    scattered = ours.fetch_codes(rows, blocks).view(torch.uint8)
    assert torch.equal(scattered, rows.view(torch.uint8)[blocks])


@pytest.mark.parametrize("blocks", [16, 64])
def test_4_sums_over_blocks_do_not_saturate(device, blocks):
    """Uniform scores: 128 a block is in the range of FP8, its sum over blocks not."""
    query = torch.zeros(1, HEADS, LATENT + ROPE).bfloat16()
    latent = Latent(device, [blocks * BLOCK], query=query)
    latent.worker.qk.quant_scales = (
        torch.tensor(1.0),
        latent.worker.k_cache.quant_scale,
    )
    # The sum of the softmax, 128 a block, is clipped to max, which divides the output.
    too_large = BLOCK * blocks / MAXIMUM[device] - 1
    assert latent.error(latent.worker) == pytest.approx(too_large, rel=0.1)
    assert latent.error(latent.pieces.decode) < 0.05


def test_5_small_probabilities_are_not_flushed(device):
    """In a block one key has P = 1 and V = 0; the rest is the sum of P = 1/2000."""
    rows = torch.zeros(BLOCK, LATENT + ROPE)
    rows[:, :LATENT] = random(BLOCK, LATENT, seed=4) * 0.1 + 1
    rows[5, :LATENT], rows[5, LATENT:] = 0, 2
    query = torch.zeros(1, HEADS, LATENT + ROPE)
    query[..., LATENT:] = 7.6 / (2 * ROPE * SCALE)  # e^7.6 = 1998
    latent = Latent(device, [BLOCK], rows.bfloat16(), query.bfloat16())
    latent.worker.over_blocks = WorkerMatmul(None)  # defect 4 aside
    assert latent.error(latent.worker) > 0.9
    assert latent.error(latent.pieces.decode) < 0.05


def test_6_prefill_and_decode_have_their_own_q(device):
    """Absorbing kv_b_proj makes q larger: one scale clips it, or wastes the other."""
    query = random(2, HEADS, LATENT + ROPE, seed=2)
    query[..., :LATENT] *= 2.5  # what absorption does to the range
    latent = Latent(device, [200, 70], query=query)
    latent.worker.over_blocks = WorkerMatmul(None)
    prefill = MAXIMUM[device] / 2.0 / SCALE  # calibrated on the prefill's q
    latent.worker.qk.quant_scales = (
        torch.tensor(prefill),
        latent.worker.k_cache.quant_scale,
    )
    assert latent.error(latent.worker) > 0.3
    pieces = latent.pieces
    pieces.load_scales(scales(5 / MAXIMUM[device], q=2.0 / MAXIMUM[device]))
    assert (
        pieces.prompt.scales["q"].dequant_scale
        == static(2.0 / MAXIMUM[device]).dequant_scale
    )
    assert pieces.decode.q_scale is None  # each row by its amax
    by_row = latent.error(pieces.decode)
    own = static(query.abs().max().item() / MAXIMUM[device])
    pieces.decode.load_scales(scales(5 / MAXIMUM[device]), own)
    assert by_row < 0.15 and latent.error(pieces.decode) < 0.15


def test_7_logits_are_float32(device):
    """Worker: the float32 buffer of fp32_softmax is handed over and not used."""
    out = torch.empty(1, 1, 1, 1, dtype=torch.float32)
    one = torch.tensor(1.0)
    x = torch.full((1, 1, 1, 8), 3.0).bfloat16()
    y = torch.full((1, 1, 8, 1), 11.0).bfloat16()
    y[..., 0, 0] = 10
    worker = WorkerMatmul((one, one))(x, y, out=out)
    assert worker.dtype == torch.bfloat16 and worker is not out
    assert worker.item() != 3 * (7 * 11 + 10)
    pieces = MLAPieces(format_of(device), False)
    pieces.load_scales(scales(1.0))
    pieces.decode.load_scales(scales(1.0), static(1.0))
    logits = pieces.decode._logits(
        x[0], y.mT.to(FP8), torch.tensor([0]), kv_heads=1, scale=1.0
    )
    assert logits.dtype == torch.float32 and logits.item() == 3 * (7 * 11 + 10)


def test_the_model_of_the_worker_is_right_where_nothing_saturates(device):
    """So that the tests above show its defects and not the model's."""
    latent = Latent(device, [100, 60])
    for decode in (latent.worker, WorkerDecode.bf16(False, True)):
        arguments = latent.arguments()
        if decode is latent.worker:
            decode.over_blocks = WorkerMatmul(None)
        else:
            plain = torch.zeros(arguments["key_cache"].shape).bfloat16()
            plain[latent.batch.slots] = torch.cat(latent.keys).bfloat16()
            arguments["key_cache"] = plain
        out = decode(**arguments)
        assert relative_error(out, latent.expected) < 0.15
