# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""hpu.fp8_gemm_v2 in software, bit by bit where sums are exact."""

import ml_dtypes
import numpy as np
import pytest
import torch

from tests import device_numbers
from tests.device_numbers import to_numpy

FP8 = torch.float8_e4m3fn
SHAPES = [((5, 8), (8, 6)), ((2, 1, 5, 8), (1, 3, 8, 6)), ((2, 3, 4, 5, 8), (8, 6))]


def codes(shape, seed, limit=0x78):
    """Random codes; small magnitudes, so that float32 sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(0x20, limit, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) << 7
    return (magnitude | sign).to(torch.uint8).view(FP8)


def product(a, b, device):
    """float32 matrix product; exact in float64, and here in float32 too."""
    exact = device_numbers.decode(to_numpy(a), device) @ device_numbers.decode(
        to_numpy(b), device
    )
    assert (exact == exact.astype(np.float32)).all()
    return exact.astype(np.float32)


@pytest.mark.parametrize("a_shape, b_shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_exact_and_rounded_once(
    device, a_shape, b_shape, dtype, transposed
):
    a, b = codes(a_shape, 1, 0x60), codes(b_shape, 2, 0x60)
    expected = product(a, b, device) * np.float32(0.7) * np.float32(1.9)
    if dtype == torch.bfloat16:
        expected = expected.astype(ml_dtypes.bfloat16)
    if transposed:
        a, b = a.mT.contiguous(), b.mT.contiguous()
    out = torch.ops.hpu.fp8_gemm_v2(
        a, transposed, b, transposed, None, dtype, torch.tensor(0.7), torch.tensor(1.9)
    )
    assert out.dtype == dtype
    np.testing.assert_array_equal(to_numpy(out).astype("f4"), expected.astype("f4"))


def test_scales_by_row_and_column_then_bias_then_d(device):
    a, b = codes((5, 8), 1, 0x60), codes((8, 6), 2, 0x60)
    rows = torch.rand(5, 1, generator=torch.Generator().manual_seed(3)) + 0.5
    columns = torch.rand(6, generator=torch.Generator().manual_seed(4)) + 0.5
    bias, d = torch.linspace(-9, 9, 6), torch.linspace(-50, 50, 30).view(5, 6)
    expected = product(a, b, device) * rows.numpy() * columns.numpy() + bias.numpy()
    gemm = torch.ops.hpu.fp8_gemm_v2
    for row_scale in (rows, rows[:, 0]):
        out = gemm(a, False, b, False, d, torch.float32, row_scale, columns, bias)
        np.testing.assert_array_equal(out.numpy(), expected)
    out = gemm(a, False, b, False, d, torch.float32, rows, columns[None], bias, True)
    np.testing.assert_array_equal(out.numpy(), expected + d.numpy())
    lists = rows[:, 0].tolist(), columns.tolist()
    out = gemm(a, False, b, False, None, torch.float32, *lists)
    unbiased = product(a, b, device) * rows.numpy() * columns.numpy()
    np.testing.assert_array_equal(out.numpy(), unbiased)


def test_sums_are_float32(device):
    """In bfloat16 256 ones and a two stay apart; in float32 they do not."""
    a = torch.ones(1, 1025).to(FP8)
    out = torch.ops.hpu.fp8_gemm_v2(a, False, a, True, None, torch.float32, 1.0, 1.0)
    assert out.item() == 1025


def test_codes_above_240_are_not_finite_on_gaudi2(device):
    a = torch.tensor([[0x78, 0x00]], dtype=torch.uint8).view(FP8)
    b = torch.tensor([[0x38, 0x38]], dtype=torch.uint8).view(FP8)
    out = torch.ops.hpu.fp8_gemm_v2(a, False, b, True, None, torch.float32)
    assert out.item() == (256.0 if device == "gaudi3" else float("inf"))
