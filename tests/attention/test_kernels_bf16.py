# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MLA's tile in bfloat16 against torch in float64.

A CPU without AVX512_BF16 runs all of it but the one instruction, in whose place two
multiply-adds stand.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import device_numbers
from tests.attention.test_kernels import case, compare
from vllm.fp8_inc.attention.kernels import mla, mla_bf16, mla_float
from vllm.fp8_inc.attention.kernels.mla import decode_latents
from vllm.fp8_inc.formats import FORMATS, GAUDI3


@pytest.fixture(autouse=True, scope="module")
def tile_in_bf16():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "HAS_DOT", True)
        yield


@st.composite
def shapes(draw):
    return {
        "stored": draw(st.sampled_from(["gaudi2", "gaudi3", "bfloat16"])),
        "lengths": draw(st.lists(st.integers(1, 400), min_size=1, max_size=5)),
        # Fewer numbers than 16 * 64 are too few for a mean to be near its bound.
        "heads": draw(st.integers(16, 140)),
        "latent": 16 * draw(st.integers(4, 12)),
        "rope": 16 * draw(st.integers(1, 4)),
        "block_size": 16 * draw(st.integers(1, 8)),
        # Powers of 2: others put a code on a tie of the result's bfloat16, and where
        # one token is all there is, that is the error of the whole.
        "dequant_scale": draw(st.sampled_from([2.0**-20, 1.0, 2.0**13])),
        "largest_logit": draw(st.sampled_from([0.1, 5.0, 35.0])),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=30, deadline=None)
@given(shapes())
def test_decode_of_any_shape(shape):
    assert compare(shape, torch.bfloat16) < 2.5e-3


@settings(max_examples=8, deadline=None)
@given(shapes(), st.integers(1, 15), st.data())
def test_few_heads_are_computed_as_many(shape, few, data):
    """However heads are grouped and padded, each is computed alone."""
    query, cache, table, lengths = case(**shape)
    first = data.draw(st.integers(0, shape["heads"] - few))
    scale = 0.01 * shape["largest_logit"] / query.shape[-1]

    def decode(query):
        parts = query.bfloat16().split([shape["latent"], shape["rope"]], dim=-1)
        fmt = FORMATS.get(shape["stored"], GAUDI3)
        return decode_latents(*parts, cache, table, lengths, scale, 1.0, fmt)

    some = slice(first, first + few)
    assert torch.equal(decode(query[:, some]), decode(query)[:, some])


@settings(max_examples=8, deadline=None)
@given(shapes(), st.integers(2, 3), st.lists(st.integers(900, 1500), max_size=2))
def test_pieces_of_long_sequences_are_joined(shape, threads, long):
    shape["lengths"] = shape["lengths"] + long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "threads_for", lambda operations: threads)
        patch.setattr(mla, "_SHORTEST_PIECE", mla_bf16.TILE)
        assert compare(shape, torch.bfloat16) < 2.5e-3


@pytest.mark.parametrize("device", FORMATS)
def test_every_code_is_read(device):
    """One token a sequence: the result is the code's value, NaN and infinity too."""
    cache = torch.zeros(16, 16, 32, dtype=torch.uint8)
    cache[:, 0, :16] = torch.arange(256).view(16, 16)
    query = torch.zeros(16, 1, 16, dtype=torch.bfloat16)
    table = torch.arange(16, dtype=torch.int32)[:, None]
    ones = torch.ones(16, dtype=torch.int32)
    out = decode_latents(query, query, cache, table, ones, 1.0, 0.5, FORMATS[device])
    expected = device_numbers.decode(np.arange(256), device).reshape(16, 16) * 0.5
    finite = np.isfinite(expected).all(axis=1)
    # 0 * NaN and 0 * infinity are NaN in the logit, hence in the whole row.
    np.testing.assert_array_equal(out.float().numpy()[finite, 0], expected[finite])
    assert out.isnan().numpy()[~finite].all()


def test_what_was_there_before_does_not_matter():
    """Memory that no token fills, NaN as it may be, is not read as one."""
    query = torch.ones(1, 3, 32, dtype=torch.bfloat16)
    cache = torch.full((2, 16, 64), 0x7F, dtype=torch.uint8)
    cache[0, :5] = 0x38
    for table, length, expected in (
        (torch.tensor([[1, 0]], dtype=torch.int32), 20, torch.nan),
        (torch.tensor([[0, 1]], dtype=torch.int32), 5, 1.0),
        (torch.tensor([[0, 1]], dtype=torch.int32), 0, 0.0),
    ):
        lengths = torch.tensor([length], dtype=torch.int32)
        out = decode_latents(query, query, cache, table, lengths, 1.0, 1.0, GAUDI3)
        torch.testing.assert_close(
            out, torch.full_like(out, expected), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cache", [torch.uint8, torch.bfloat16, torch.float16])
def test_it_serves_where_it_rounds_nothing_that_it_reads(query, cache, monkeypatch):
    kinds = mla.KINDS[query], mla.KINDS[cache]
    exact = query == torch.bfloat16 and cache != torch.float16
    assert mla._tile_for(*kinds) is (mla_bf16 if exact else mla_float)
    monkeypatch.setattr(mla, "HAS_DOT", False)
    assert mla._tile_for(*kinds) is mla_float


# Compiles the inner loops for a CPU; prints whether the tile in bfloat16 serves there
# and how often the instruction is in the code.
_COMPILE = """
from numba import njit, types
from vllm.fp8_inc.attention.kernels import mla, tiles_bf16
whole, number = types.int64, types.float32
loops = (
    (tiles_bf16.logits_of, (*[whole] * 8, number)), (tiles_bf16.output_of, [whole] * 8)
)
serves = mla._tile_for(mla.rows.BF16, mla.rows.FP8) is mla.mla_bf16
print(serves, *[
    njit(tuple(kinds))(function.py_func).inspect_asm()[tuple(kinds)].count("vdpbf16ps")
    for function, kinds in loops
])
"""
_AVX2 = "+avx2,+avx,+fma,+f16c,+sse4.2,+bmi,+bmi2,+popcnt"
_AVX512 = _AVX2 + ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="x86"
)
@pytest.mark.parametrize(
    "cpu, features, has_instruction",
    [
        ("cooperlake", _AVX512 + ",+avx512bf16", True),
        ("sapphirerapids", _AVX512 + ",+avx512bf16", True),
        ("znver4", _AVX512 + ",+avx512bf16", True),
        ("skylake-avx512", _AVX512, False),
        ("icelake-server", _AVX512, False),
        ("haswell", _AVX2, False),
        ("znver3", _AVX2, False),
        ("x86-64-v3", _AVX2, False),
    ],
)
def test_the_instruction_is_there_where_the_cpu_has_it(cpu, features, has_instruction):
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    serves, *counts = done.stdout.split()
    assert serves == str(has_instruction)
    # Logits: 8 pairs by 16 accumulators in each of three functions.
    least = (3 * 128, 3 * 16) if has_instruction else (0, 0)
    assert [int(count) >= n for count, n in zip(counts, least)] == [True, True]
    if not has_instruction:
        assert counts == ["0", "0"]
