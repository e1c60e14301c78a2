# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8 codes are the device's: every code, every 16-bit value, every midpoint."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import device_numbers
from vllm.fp8_inc.formats import FORMATS, GAUDI2, GAUDI3

BOTH = pytest.mark.parametrize("fmt", [GAUDI2, GAUDI3], ids=lambda fmt: fmt.name)
INF, NAN = math.inf, math.nan


def codes_of(fmt, values, dtype=torch.float32):
    return fmt.encode(torch.tensor(values, dtype=dtype)).tolist()


def test_each_device_has_its_maximum_and_its_name():
    assert FORMATS == {"gaudi2": GAUDI2, "gaudi3": GAUDI3}
    assert {name: fmt.max for name, fmt in FORMATS.items()} == device_numbers.MAXIMUM
    assert (GAUDI2.max_code, GAUDI3.max_code) == (0x77, 0x7E)


@BOTH
def test_every_code_decodes_to_its_value(fmt):
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = fmt.decode(codes)
    expected = device_numbers.decode(codes.numpy(), fmt.name)
    assert decoded.dtype == torch.float32
    np.testing.assert_array_equal(decoded.double().numpy(), expected)
    numbers = ~np.isnan(expected)
    assert (np.signbit(decoded.numpy()) == np.signbit(expected))[numbers].all()


@BOTH
def test_a_table_first_read_while_a_bf16_model_loads_is_float32_on_the_host(fmt):
    fresh = dataclasses.replace(fmt)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):  # as the device of the worker
            table = fresh.table
    finally:
        torch.set_default_dtype(torch.float32)
    assert table.dtype == torch.float32
    assert table.device.type == "cpu"


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_encodes_as_on_the_device(fmt, dtype):
    values = device_numbers.all_values(dtype)
    expected = device_numbers.encode(device_numbers.to_numpy(values), fmt.name)
    np.testing.assert_array_equal(fmt.encode(values).numpy(), expected)


@BOTH
def test_midpoints_round_to_even_and_their_neighbours_to_the_nearest(fmt):
    lower = np.arange(fmt.max_code, dtype=np.uint8)
    upper = lower + 1
    values = device_numbers.decode(np.stack([lower, upper]), fmt.name)
    middle = values.mean(axis=0).astype(np.float32)
    assert (2 * middle == values.sum(axis=0)).all(), "midpoints are exact in float32"
    expected = {
        "below": (np.nextafter(middle, np.float32(-INF)), lower),
        "tie": (middle, np.where(lower % 2 == 0, lower, upper)),
        "above": (np.nextafter(middle, np.float32(INF)), upper),
    }
    for where, (inputs, codes) in expected.items():
        for sign, bit in ((1, 0), (-1, 0x80)):
            got = fmt.encode(torch.from_numpy(sign * inputs)).numpy()
            np.testing.assert_array_equal(got, codes | bit, err_msg=where)


@BOTH
def test_every_finite_code_survives_a_round_trip(fmt):
    finite = [code for code in range(256) if code & 0x7F <= fmt.max_code]
    codes = torch.tensor(finite, dtype=torch.uint8)
    assert torch.equal(fmt.encode(fmt.decode(codes)), codes)


@pytest.mark.parametrize(
    "value, gaudi2, gaudi3",
    [
        (0.0, 0x00, 0x00),
        (-0.0, 0x80, 0x80),
        (2.0**-9, 0x01, 0x01),
        (7 * 2.0**-9, 0x07, 0x07),
        (2.0**-6, 0x08, 0x08),
        (2.0**-10, 0x00, 0x00),
        (-(2.0**-10), 0x80, 0x80),
        (1.5 * 2.0**-10, 0x01, 0x01),
        (1e-45, 0x00, 0x00),
        (240.0, 0x77, 0x77),
        (248.0, 0x77, 0x78),
        (256.0, 0x77, 0x78),
        (448.0, 0x77, 0x7E),
        (464.0, 0x77, 0x7E),
        (-1e30, 0xF7, 0xFE),
        (INF, 0x77, 0x7E),
        (-INF, 0xF7, 0xFE),
        (NAN, 0x7F, 0x7F),
        (-NAN, 0x7F, 0xFF),
    ],
)
def test_denormals_zeros_saturation_and_nan_have_these_codes(value, gaudi2, gaudi3):
    # Beside a NaN and without one: encode has a way of its own for each.
    values = [value, 1.0, NAN]
    assert codes_of(GAUDI2, values) == [gaudi2, 0x38, 0x7F]
    assert codes_of(GAUDI3, values) == [gaudi3, 0x38, 0x7F]
    assert codes_of(GAUDI2, [value]) == [gaudi2]
    assert codes_of(GAUDI3, [value]) == [gaudi3]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_a_dtype_that_would_round_twice_is_refused_by_name(fmt, dtype):
    with pytest.raises(TypeError, match=str(dtype)):
        fmt.encode(torch.ones(2).to(dtype))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quant_scale", [1.3, 0.011, 0.25, 37.0])
def test_cast_takes_the_product_in_the_dtype_of_the_values(fmt, dtype, quant_scale):
    values = device_numbers.all_values(torch.bfloat16).to(dtype)
    values = values[values.isfinite()]
    got = fmt.cast(values, torch.tensor(quant_scale))
    expected = device_numbers.cast(values, quant_scale, fmt.name)
    np.testing.assert_array_equal(got.numpy(), expected)


@BOTH
def test_a_float32_product_would_give_other_bytes(fmt):
    values = torch.linspace(-100, 100, 20_000).bfloat16()
    differ = {}
    for quant_scale in (1.3, 0.25):
        cast = fmt.cast(values, torch.tensor(quant_scale))
        acting = float(torch.tensor(quant_scale).bfloat16())
        wide = device_numbers.encode(values.float().numpy() * acting, fmt.name)
        differ[quant_scale] = float((cast.numpy() != wide).mean())
    assert 0.01 < differ[1.3] < 0.1, "cast must not take a float32 product"
    assert differ[0.25] == 0, "powers of two agree either way"


@BOTH
def test_cast_broadcasts_a_scale_for_each_row(fmt):
    values = torch.linspace(-9, 9, 24).reshape(4, 6).bfloat16()
    scales = torch.tensor([0.5, 1.3, 7.0, 90.0])
    got = fmt.cast(values, scales[:, None]).numpy()
    for row, scale in enumerate(scales.tolist()):
        expected = device_numbers.cast(values[row], scale, fmt.name)
        np.testing.assert_array_equal(got[row], expected)


@BOTH
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2), ()])
def test_empty_and_scalar_tensors_keep_their_shape(fmt, shape):
    values = torch.full(shape, -1.5)
    codes = fmt.encode(values)
    assert (codes.shape, codes.dtype) == (values.shape, torch.uint8)
    decoded = fmt.decode(codes)
    assert (decoded.shape, decoded.dtype) == (values.shape, torch.float32)
    assert torch.equal(decoded, values)


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    offset=st.integers(0, 60_000),
    data=st.data(),
)
def test_any_strides_give_the_codes_of_a_contiguous_copy(
    fmt, shape, steps, offset, data
):
    order = data.draw(st.permutations(range(len(shape))))
    strides = [1] * len(shape)
    size = 1
    for dim in order:
        strides[dim] = size * steps[dim]
        size = strides[dim] * max(shape[dim], 1)
    # From all values, so that NaN and infinities are among them.
    storage = device_numbers.all_values(torch.bfloat16)
    offset = min(offset, storage.numel() - size)
    values = storage.as_strided(shape, strides, offset)
    expected = device_numbers.encode(device_numbers.to_numpy(values), fmt.name)
    codes = fmt.encode(values)
    np.testing.assert_array_equal(codes.numpy(), expected)
    strided = torch.empty_strided(shape, strides, dtype=torch.uint8)
    strided.copy_(codes)
    np.testing.assert_array_equal(
        fmt.decode(strided).numpy(), device_numbers.decode(expected, fmt.name)
    )


@BOTH
def test_an_expanded_tensor_encodes_each_of_its_elements(fmt):
    values = torch.tensor([[NAN], [300.0]]).expand(2, 3)
    assert fmt.encode(values).tolist() == [[0x7F] * 3, codes_of(fmt, [300.0]) * 3]
