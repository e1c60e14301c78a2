# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Dynamic activation scales are those of the device, on every kind of row."""

import numpy as np
import pytest
import torch

from tests import device_numbers
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.layers.activations import quantize, quantize_rows

DEVICES = pytest.mark.parametrize("device", list(FORMATS))
DTYPES = [torch.bfloat16, torch.float32]


def rows(dtype=torch.bfloat16, columns=48):
    """Rows of unequal amplitude: all zero, tiny, ordinary, huge."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.tensor([0.0, 1e-12, 1e-6, 0.01, 0.5, 3.0, 700.0, 1e30])
    x = torch.randn(len(sizes), columns, generator=generator) * sizes[:, None]
    x[-1, 0] = torch.finfo(dtype).max
    return x.to(dtype)


def expected(x, device):
    """Codes, float64 dequant scales: each operation rounded to the dtype of x."""
    values = device_numbers.to_numpy(x)
    kind, maximum = values.dtype.type, device_numbers.MAXIMUM[device]
    amax = np.abs(values).max(-1, keepdims=True)
    scale = (amax + kind(1e-8)) / kind(maximum)
    codes = device_numbers.encode(values * (kind(1) / scale), device)
    return codes, scale.astype(np.float64)


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_has_the_scale_of_its_amax(device, dtype):
    x = rows(dtype)
    codes, scale = quantize_rows(x, FORMATS[device])
    expected_codes, expected_scale = expected(x, device)
    np.testing.assert_array_equal(codes.numpy(), expected_codes)
    np.testing.assert_array_equal(scale.double().numpy(), expected_scale)
    assert scale.dtype == torch.float32
    # The rounding of scale and reciprocal may carry the amax one step past the top.
    top = device_numbers.decode(codes.numpy() & 0x7F, device).max(-1)
    assert (top[3:] >= 0.93 * device_numbers.MAXIMUM[device]).all()


@DEVICES
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_zeros_stay_zeros(device, dtype):
    codes, scale = quantize_rows(torch.zeros(2, 3, 8, dtype=dtype), FORMATS[device])
    assert codes.count_nonzero() == 0
    assert scale.shape == (2, 3, 1)
    assert (scale > 0).all() and scale.isfinite().all()


@DEVICES
def test_small_rows_in_float16_are_finite(device):
    x = torch.tensor([[6e-8, 0.0], [1e-4, -2e-5], [0.003, 0.001], [65504.0, 1.0]])
    codes, scale = quantize_rows(x.half(), FORMATS[device])
    back = FORMATS[device].decode(codes) * scale
    assert back.isfinite().all()
    torch.testing.assert_close(back[2:], x[2:], rtol=0.07, atol=0.15)


def test_a_nan_or_an_infinity_is_not_hidden():
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    x[0, 1], x[1, 2] = torch.nan, torch.inf
    codes, scale = quantize_rows(x, FORMATS["gaudi3"])
    back = FORMATS["gaudi3"].decode(codes) * scale
    assert back.isnan().any(-1).all()


def test_rows_do_not_see_each_other():
    x = rows()
    whole, _ = quantize_rows(x, FORMATS["gaudi3"])
    for n in range(len(x)):
        alone, _ = quantize_rows(x[n : n + 1], FORMATS["gaudi3"])
        assert torch.equal(alone[0], whole[n])


def test_a_static_scale_is_undone_by_its_own_reciprocal():
    quant_scale = torch.tensor(1 / 0.0317).bfloat16()
    codes, scale = quantize(rows()[3:6], quant_scale, FORMATS["gaudi2"])
    x = device_numbers.cast(rows()[3:6], quant_scale.item(), "gaudi2")
    np.testing.assert_array_equal(codes.numpy(), x)
    assert scale.item() == np.float32(1) / np.float32(quant_scale.item())
