# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The byte counter, what it finds, and the arithmetic of the bounds."""

import pytest
import torch

from benchmarks import hpu_bytes, hpu_roofline
from benchmarks.hpu_bytes import (
    GQA,
    MLA,
    count,
    ours,
    ours_bf16,
    worker_bf16,
    worker_fp8,
)
from vllm.fp8_inc import hpu_ops
from vllm.fp8_inc.hpu_ops import ByteCounter

FP8 = torch.float8_e4m3fn


@pytest.fixture
def on_gaudi3():
    with hpu_ops.emulate("gaudi3"):
        yield


def counted(function):
    with ByteCounter() as counter:
        function()
    return counter.read.total(), counter.written.total()


def test_operators_views_and_expansions():
    x = torch.ones(8, 16)
    assert counted(lambda: x + x) == (2 * 512, 512)
    assert counted(lambda: x.t().unsqueeze(0)[:, 2:]) == (0, 0)
    assert counted(lambda: x[:4].exp()) == (256, 256)
    assert counted(lambda: x[:1].expand(8, 16).sum()) == (64, 4)
    assert counted(lambda: torch.empty(99)) == (0, 0)


def test_gathers_and_scatters_touch_what_they_move():
    cache, ids = torch.zeros(100, 16), torch.tensor([3, 7])
    rows = torch.ones(2, 16)
    assert counted(lambda: cache.index_select(0, ids)) == (128 + 16, 128)
    assert counted(lambda: cache.index_copy_(0, ids, rows)) == (128 + 16, 128)


def test_a_broadcast_product_is_one_operator(on_gaudi3):
    a, b = torch.ones(4, 6, 2, 8), torch.ones(4, 1, 8, 3)
    assert counted(lambda: torch.matmul(a, b)) == (4 * (384 + 96), 4 * 144)
    codes = a.to(FP8)
    assert counted(
        lambda: torch.ops.hpu.fp8_gemm_v2(
            codes, False, codes, True, None, torch.float32
        )
    ) == (2 * 384, 4 * 6 * 4 * 4)


# The operands of the cache, of each operator in turn, by hand.
MLA_BYTES = {
    (worker_fp8, False): 2 * 576 + 3 * 576 + 3 * 576 + 576 + 3 * 512 + 512,  # 7232
    (worker_fp8, True): 7232 - 1152,
    (worker_bf16, False): 2 * 1152 + 1152 + 1024,  # 4480
    (ours, False): 2 * 576 + 576 + 512,  # 2240
    (ours, True): 1088,
    (ours_bf16, False): 2 * 576 + 3 * 576 + 1152 + 1024,
}
# 8 heads of 128, K and V: n = 1024 bytes of each.
GQA_BYTES = {
    (worker_fp8, False): 2 * 9 * 1024,
    (worker_bf16, True): 2 * 2048,
    (ours, False): 2 * 3 * 1024,
    (ours, True): 2 * 1024,
    (ours_bf16, True): 2 * 5 * 1024,
}
CASES = [(MLA, *key, value) for key, value in MLA_BYTES.items()]
CASES += [(GQA, *key, value) for key, value in GQA_BYTES.items()]


@pytest.mark.parametrize("shape, build, contiguous, expected", CASES)
def test_bytes_of_a_cached_token(on_gaudi3, shape, build, contiguous, expected):
    dtype = torch.bfloat16 if build is worker_bf16 else FP8
    size = count(build(shape, contiguous), shape, dtype)
    assert size.cache == pytest.approx(expected, abs=1e-6)
    assert size.each_head > 0


def test_bounds_of_the_roofline():
    """Where one resource rules, the bound is that resource's, by hand."""
    sizes = dict.fromkeys(
        (
            "worker, bf16 cache, gathered",
            "worker, bf16 cache, contiguous",
            "worker, fp8_inc, gathered",
            "this fork, gathered",
            "this fork, contiguous",
            'this fork, hpu_matmul "bf16", gathered',
        ),
        1000.0,
    )
    ways = hpu_roofline.paths(sizes)
    device = hpu_roofline.Device(1e15, 1e12, 1e30, 1e30, None)
    model = hpu_roofline.Model(2, 100.0, 10.0, 3, 8, 2, 5, 16)
    bound = hpu_roofline.tokens_per_second
    # Weights: all of the dense ones, 3 layers of 8 experts of which each is missed by
    # four tokens with (6/8)^4; two devices share them. Cache: 5 layers.
    touched = 100 + 10 * 3 * 8 * (1 - 0.75**4)
    seconds = (touched / 2 + 4 * 50 * 5 * 1000) / 1e12
    assert bound(device, model, ways["fork, gathered"], 4, 50) == pytest.approx(
        4 / seconds
    )
    slow = device._replace(bandwidth=1e30, fp8=1e9, bf16=0.5e9)
    linear = 2 * (100 + 10 * 3 * 2) * 4 / 2 / 1e9
    attention = 2 * 8 * (576 + 512) * 4 * 50 * 5
    for name, peak in (
        ("fork, gathered", 1e9),
        ("fork, bf16 matmul, gathered", 0.5e9),
    ):
        expected = 4 / (linear + attention / peak)
        assert bound(slow, model, ways[name], 4, 50) == pytest.approx(expected)
    vector = device._replace(bandwidth=1e30, vector=1e6)
    expected = 1e6 / (50 * 5 * 576)
    found = bound(vector, model, ways["fork, bf16 matmul, gathered"], 4, 50)
    assert found == pytest.approx(expected)
    needed = (100 + 10 * 3 * 8) / 2 + 4 * 50 * 5 * 576
    for memory, fits in ((needed, True), (needed - 1, False)):
        small = device._replace(memory=memory)
        assert (bound(small, model, ways["fork, gathered"], 4, 50) is not None) == fits


def test_a_smaller_cache_is_never_slower():
    sizes = {
        "worker, bf16 cache, gathered": 4480,
        "worker, bf16 cache, contiguous": 2176,
        "worker, fp8_inc, gathered": 7232,
        "this fork, gathered": 2240,
        "this fork, contiguous": 1088,
        'this fork, hpu_matmul "bf16", gathered': 5056,
    }
    ways = hpu_roofline.paths(sizes)
    for device in hpu_roofline.DEVICES.values():
        for model in hpu_roofline.MODELS.values():
            bounds = [
                hpu_roofline.tokens_per_second(device, model, ways[name], 32, 2048)
                for name in (
                    "worker fp8_inc, gathered",
                    "bf16, gathered",
                    "fork, gathered",
                    "fork, contiguous",
                )
            ]
            assert bounds == sorted(bounds)


def test_the_table_has_every_path(on_gaudi3, monkeypatch):
    monkeypatch.setattr(
        hpu_bytes, "count", lambda *_: hpu_bytes.Bytes(cache=1.0, each_head=2.0)
    )
    rows = hpu_bytes.table()
    assert len({tuple(row.values())[:3] for row in rows}) == len(rows) == 2 * 4 * 2
