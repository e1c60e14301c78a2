# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The table that makes weights of 448 valid on Gaudi2."""

import numpy as np
import pytest
import torch

from benchmarks import weight_conversion
from tests import device_numbers
from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.formats import GAUDI2, GAUDI3
from vllm.fp8_inc.layers.halving import HALVED, halve, largest_code
from vllm.fp8_inc.layers.weights import check_scales, fit_weight

CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES[(CODES & 0x7F) != 0x7F]


def fp8(codes):
    return codes.clone().view(torch.float8_e4m3fn)


def test_every_code_is_that_of_half_its_value():
    values = device_numbers.decode(NUMBERS.numpy(), "gaudi3") / 2
    expected = device_numbers.encode(values, "gaudi2")
    np.testing.assert_array_equal(HALVED[NUMBERS.numpy()], expected)
    weight = fp8(NUMBERS).view(2, -1)
    halve(weight)
    np.testing.assert_array_equal(device_numbers.to_numpy(weight).ravel(), expected)
    assert largest_code(weight) == 0x76


def test_only_odd_denormals_are_not_exact():
    exact = device_numbers.decode(HALVED[NUMBERS.numpy()], "gaudi2") * 2
    changed = NUMBERS.numpy()[exact != device_numbers.decode(NUMBERS.numpy(), "gaudi3")]
    # Below 0x10 halving leaves fewer bits than the value has.
    assert set((changed & 0x7F).tolist()) <= set(range(1, 0x10, 2))


@pytest.mark.parametrize("code", range(256))
def test_the_largest_code_is_found(code):
    weight = torch.full((3, 5), 0x80, dtype=torch.uint8)
    weight[1, 2] = code
    assert largest_code(fp8(weight)) == code & 0x7F


@pytest.mark.parametrize("code, factor", [(0x77, 1), (0xF7, 1), (0x78, 2), (0xFE, 2)])
def test_weights_are_halved_only_where_a_code_is_above_240(code, factor):
    weight = torch.tensor([[0x01, 0x38], [0x40, code]], dtype=torch.uint8)
    fitted = fp8(weight)
    assert fit_weight(fitted, Adjustment(GAUDI3, GAUDI2, "test"), "layer") == factor
    assert torch.equal(fitted.view(torch.uint8), weight) == (factor == 1)


def test_nothing_changes_on_gaudi3_and_for_weights_made_for_240():
    for rule in (Adjustment(GAUDI3, GAUDI3, "test"), Adjustment(GAUDI2, GAUDI3, "t")):
        weight = fp8(NUMBERS)
        assert fit_weight(weight, rule, "layer") == 1.0
        assert torch.equal(weight.view(torch.uint8), NUMBERS)
    small = fp8(NUMBERS[(NUMBERS & 0x7F) <= 0x77])
    assert fit_weight(small, Adjustment(GAUDI2, GAUDI2, "test"), "layer") == 1.0


def test_a_nan_is_an_error_that_names_the_layer():
    weight = fp8(torch.tensor([0x7F, 0x01], dtype=torch.uint8))
    for served_on in (GAUDI2, GAUDI3):
        with pytest.raises(ValueError, match=r"layers\.3\.q_proj\.weight holds NaN"):
            fit_weight(weight, Adjustment(GAUDI3, served_on, "t"), "layers.3.q_proj")


def test_the_first_impossible_scale_is_named():
    scale = torch.tensor([[0.5, 0.25], [-3.0, torch.nan]])
    with pytest.raises(ValueError, match=r"q_proj\.weight_scale_inv is -3: missing"):
        check_scales(scale, "q_proj.weight_scale_inv")


def test_the_benchmark_runs():
    figures = weight_conversion.measure(megabytes=1, turns=3)
    assert figures["table over round trip"] > 1
