# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Dequant scales are read strictly and undo exactly what the quant scale did."""

import math
import re

import ml_dtypes
import numpy as np
import pytest
import torch

from tests import device_numbers
from vllm.fp8_inc.scales import StaticScale, read_dequant_scale

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCALES = [0.011, 0.0317, 1 / 3, 1.0, 1.3, 2.5, 117.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_the_quant_scale_is_the_reciprocal_in_the_activation_dtype(scale, dtype):
    static = StaticScale.from_dequant(scale, dtype)
    kind = device_numbers.to_numpy(torch.empty(0, dtype=dtype)).dtype
    expected = (np.float32(1) / np.float32(scale)).astype(kind)
    assert (static.quant_scale.dtype, static.quant_scale.shape) == (dtype, ())
    assert static.quant_scale.item() == float(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_the_dequant_scale_is_the_reciprocal_of_the_quant_scale_that_acts(scale, dtype):
    static = StaticScale.from_dequant(scale, dtype)
    assert (static.dequant_scale.dtype, static.dequant_scale.shape) == (
        torch.float32,
        (),
    )
    acting = np.float32(static.quant_scale.item())
    assert static.dequant_scale.item() == float(np.float32(1) / acting)
    assert static.dequant_scale.item() == pytest.approx(scale, rel=2**-8)


def test_the_default_dtype_of_a_model_that_loads_changes_nothing():
    expected = StaticScale.from_dequant(0.0317, torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        static = StaticScale.from_dequant(0.0317, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected.quant_scale.item() == float(np.float32(1) / np.float32(0.0317))
    assert torch.equal(static.quant_scale, expected.quant_scale)
    assert torch.equal(static.dequant_scale, expected.dequant_scale)


@pytest.mark.parametrize("scale", [0.011, 0.0317, 1.3])
def test_reads_have_no_bias_where_the_checkpoints_scale_would_have_one(scale):
    static = StaticScale.from_dequant(scale, torch.bfloat16)
    # Whole binades, evenly and finely: the errors of single roundings cancel.
    values = torch.linspace(16 * scale, 256 * scale, 200_000)
    codes = device_numbers.cast(values, static.quant_scale.double().item(), "gaudi3")
    read = device_numbers.decode(codes, "gaudi3").sum() / values.double().sum().item()
    assert abs(read * static.dequant_scale.double().item() - 1) < 1e-4
    assert abs(read * scale - 1) > 3e-4


@pytest.mark.parametrize(
    "scale, dtype",
    [
        (1e-45, torch.bfloat16),
        (1e-300, torch.float32),
        (1e300, torch.float32),
        (1e-5, torch.float16),
        (1e9, torch.float16),
    ],
)
def test_a_scale_without_a_reciprocal_is_an_error_that_names_both(scale, dtype):
    with pytest.raises(ValueError) as error:
        StaticScale.from_dequant(scale, dtype)
    assert f"{scale} has no reciprocal in {dtype}" in str(error.value)


@pytest.mark.parametrize(
    "dtype, kind",
    [
        (torch.bfloat16, ml_dtypes.bfloat16),
        (torch.float16, np.float16),
        (torch.float32, np.float32),
        (torch.float64, np.float64),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_one_number_of_any_float_dtype_and_any_shape_of_ones_is_read(
    shape, dtype, kind
):
    value = read_dequant_scale(torch.full(shape, 0.011, dtype=dtype))
    assert type(value) is float
    assert value == float(np.float64(0.011).astype(kind))


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_value_that_is_no_scale_is_an_error_that_names_it(value, dtype):
    with pytest.raises(ValueError, match=f"is {value}, .*positive and finite"):
        read_dequant_scale(torch.tensor([value], dtype=dtype))


@pytest.mark.parametrize("shape", [(2,), (4, 1, 1), (0,), (2, 3)])
def test_more_or_less_than_one_number_is_an_error_that_names_the_shape(shape):
    with pytest.raises(ValueError) as error:
        read_dequant_scale(torch.ones(shape))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_an_integer_is_an_error_that_names_the_dtype(dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        read_dequant_scale(torch.ones(1, dtype=dtype))


@pytest.mark.parametrize(
    "value, expected",
    [
        (1e-45, "subnormal"),
        (2.0**-127, "subnormal"),
        (2.0**-126, None),
        (1e30, None),
        (1.1e30, "no activation is above 1e+30"),
        (3e38, "no activation is above 1e+30"),
    ],
)
def test_a_size_that_no_amax_has_is_an_error_that_names_the_value(value, expected):
    tensor = torch.tensor([value], dtype=torch.float64)
    if expected is None:
        assert read_dequant_scale(tensor) == value
        return
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        read_dequant_scale(tensor)
    assert f"is {value:g}" in str(error.value)
