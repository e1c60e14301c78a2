# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The casts of torch.ops.hpu, code by code against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from tests import device_numbers
from tests.device_numbers import to_numpy

FP8 = torch.float8_e4m3fn
# Odd, a power of two, overflowing and underflowing ones.
SCALES = [1.3, 0.125, 77.0, 3e-5]
FORMS = {
    "cpu scalar": torch.tensor,
    "device tensor": lambda scale: torch.tensor([scale]),
    "parameter": lambda scale: torch.nn.Parameter(
        torch.tensor(scale), requires_grad=False
    ),
    "float": float,
    "list": lambda scale: [scale],
}


def cast_to(x, scale, is_amax=False, shape=None):
    return torch.ops.hpu.cast_to_fp8_v2(x, scale, False, is_amax, FP8, shape)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(device, dtype, scale):
    values = device_numbers.all_values(dtype)
    codes = to_numpy(cast_to(values, torch.tensor(scale))[0])
    expected = device_numbers.cast(values, np.float32(scale), device)
    # A product may lose the sign of a NaN: IEEE 754 leaves it open.
    nan = values.isnan().numpy()
    np.testing.assert_array_equal(codes[nan] & 0x7F, 0x7F)
    np.testing.assert_array_equal(codes[~nan], expected[~nan])


def test_float32_products_are_float32(device):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3)) * 100
    codes = to_numpy(cast_to(values, 1.3)[0])
    np.testing.assert_array_equal(
        codes, device_numbers.cast(values, np.float32(1.3), device)
    )


def test_the_product_is_not_taken_in_float32(device):
    """The mistake the facts warn of: some codes differ, so the test above sees it."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3)).bfloat16()
    codes = to_numpy(cast_to(values, 1.3)[0])
    wrong = device_numbers.encode(values.float().numpy() * np.float32(1.3), device)
    assert 0.01 < (codes != wrong).mean() < 0.2


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_scale(device, form):
    values = torch.linspace(-300, 300, 999).bfloat16()
    scale = FORMS[form](1.3)
    codes, amax = cast_to(values, scale, is_amax=True)
    np.testing.assert_array_equal(
        to_numpy(codes), device_numbers.cast(values, np.float32(1.3), device)
    )
    assert amax.dtype == torch.float32 and amax.dim() == 0
    assert amax.item() == values.abs().max().item()
    back = torch.ops.hpu.cast_from_fp8(codes, scale, torch.float32)
    expected = device_numbers.decode(to_numpy(codes), device).astype("f4")
    np.testing.assert_array_equal(back.numpy(), expected * np.float32(1.3))


def test_no_scale_and_no_amax(device):
    codes, amax = cast_to(torch.tensor([1.0, -3.0]), None)
    assert codes.float().tolist() == [1.0, -3.0] and codes.dtype == FP8
    assert amax.shape == (0,) and amax.dtype == torch.float32


@pytest.mark.parametrize("scales", [[1.3, 0.4, 2.0], torch.tensor([1.3, 0.4, 2.0])])
@pytest.mark.parametrize("shape", [[3, 1], [1, 3]])
def test_scale_shape_chooses_the_channel(device, scales, shape):
    x = torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(1)).bfloat16() * 99
    codes = to_numpy(cast_to(x, scales, shape=shape)[0])
    each = torch.as_tensor(scales, dtype=torch.float32).reshape(shape).expand(3, 3)
    for i in range(3):
        for j in range(3):
            expected = device_numbers.cast(
                x[:, i, j], np.float32(each[i, j].item()), device
            )
            np.testing.assert_array_equal(codes[:, i, j], expected)
    back = torch.ops.hpu.cast_from_fp8(cast_to(x, None)[0], scales, x.dtype, shape)
    plain = torch.ops.hpu.cast_from_fp8(cast_to(x, None)[0], None, x.dtype)
    assert torch.equal(back, plain * each.to(x.dtype))


@pytest.mark.parametrize("scale", SCALES)
def test_every_code_back(device, scale):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)
    back = torch.ops.hpu.cast_from_fp8(codes, torch.tensor(scale), torch.bfloat16)
    exact = device_numbers.decode(to_numpy(codes), device).astype(ml_dtypes.bfloat16)
    expected = exact * np.asarray(np.float32(scale)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(back.float().numpy(), expected.astype(np.float32))


def test_fp8_passes_unchanged(device):
    codes = torch.arange(0x78, dtype=torch.int32).to(torch.uint8).view(FP8)
    again = cast_to(codes, None)[0]
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


def test_what_is_not_emulated_is_refused(device):
    with pytest.raises(NotImplementedError, match="stochastic_rounding True"):
        torch.ops.hpu.cast_to_fp8_v2(torch.ones(2), None, True, False, FP8)
    with pytest.raises(NotImplementedError, match="dtype None"):
        torch.ops.hpu.cast_to_fp8_v2(torch.ones(2))
