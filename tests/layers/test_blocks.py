# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""128x128 block weights become what the device makes of them."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from tests import device_numbers
from tests.layers.test_linear import assert_close
from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.layers.blocks import blocks, check_fused, scale_rows
from vllm.fp8_inc.layers.linear import Fp8LinearScheme
from vllm.fp8_inc.layers.recipe import Fp8Recipe

NAME = "model.layers.4.mlp.gate_up_proj"
BF16 = ml_dtypes.bfloat16
# Each within, at and beyond the edge of its last block.
SHAPES = [([40], 24), ([128], 128), ([256, 72], 200), ([130], 257), ([128, 128], 136)]
DEVICES = pytest.mark.parametrize("device", list(FORMATS))


def checkpoint(widths, columns):
    """Codes, block scales of every projection; all scales differ."""
    generator = torch.Generator().manual_seed(sum(widths) + columns)
    weights, scales = [], []
    for width in widths:
        weight = torch.randn(width, columns, generator=generator) * 90
        weights.append(weight.clamp(-448, 448).to(torch.float8_e4m3fn))
        shape = blocks(width, 128), blocks(columns, 128)
        scales.append(torch.rand(shape, generator=generator) * 0.02 + 0.001)
    return weights, scales


def load(widths, columns, weights, scales, device, dtype=torch.bfloat16):
    adjustment = Adjustment(FORMATS["gaudi3"], FORMATS[device], "as the test says")
    recipe = Fp8Recipe("block", False, adjustment, scale_name="weight_scale_inv")
    layer, scheme = torch.nn.Module(), Fp8LinearScheme(recipe, NAME)
    scheme.create_weights(
        layer, columns, columns, widths, sum(widths), dtype, weight_loader=None
    )
    codes = torch.cat([weight.view(torch.uint8) for weight in weights])
    layer.weight.data.view(torch.uint8).copy_(codes)
    if scales is not None:
        layer.weight_scale_inv.data.copy_(torch.cat(scales))
    scheme.process_weights_after_loading(layer)
    layer.forward = lambda x: scheme.apply_weights(layer, x, None)
    return layer


def expected_weight(weights, scales, device):
    """Codes and float64 row scales, element by element through bfloat16."""
    maximum, codes, row_scales = device_numbers.MAXIMUM[device], [], []
    values = [
        device_numbers.decode(device_numbers.to_numpy(w), "gaudi3") for w in weights
    ]
    halve = max(np.abs(v).max() for v in values) > maximum
    for value, scale in zip(values, scales, strict=True):
        scale = scale.double().numpy()
        if halve:
            half = device_numbers.encode(value / 2, device)
            value, scale = device_numbers.decode(half, device), 2 * scale
        row, column = np.indices(value.shape) // 128
        wide = value.astype(BF16) * scale.astype(np.float32).astype(BF16)[row, column]
        amax = np.abs(wide).max(-1, keepdims=True)
        row_scale = (amax + BF16(1e-8)) / BF16(maximum)
        codes.append(device_numbers.encode(wide * (BF16(1) / row_scale), device))
        row_scales.append(row_scale[:, 0].astype(np.float64))
    return np.concatenate(codes), np.concatenate(row_scales)


@DEVICES
@pytest.mark.parametrize("widths, columns", SHAPES)
def test_blocks_are_requantised_per_channel(device, widths, columns):
    weights, scales = checkpoint(widths, columns)
    layer = load(widths, columns, weights, scales, device)
    codes, row_scales = expected_weight(weights, scales, device)
    np.testing.assert_array_equal(device_numbers.to_numpy(layer.weight), codes)
    np.testing.assert_array_equal(layer.weight_scale.double().numpy(), row_scales)
    assert not hasattr(layer, "weight_scale_inv")
    wide = layer.dequantized_weight(torch.float32).double().numpy()
    exact = device_numbers.decode(codes, device) * row_scales[:, None]
    np.testing.assert_allclose(wide, exact, rtol=1e-6)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_that_of_the_device(device, dtype):
    widths, columns = [256, 72], 200
    weights, scales = checkpoint(widths, columns)
    layer = load(widths, columns, weights, scales, device, dtype)
    generator = torch.Generator().manual_seed(2)
    sizes = torch.tensor([0.0, 0.01, 1.0, 40.0, 2000.0])
    x = (torch.randn(5, columns, generator=generator) * sizes[:, None]).to(dtype)
    values = device_numbers.to_numpy(x)
    kind, maximum = values.dtype.type, device_numbers.MAXIMUM[device]
    scale = (np.abs(values).max(-1, keepdims=True) + kind(1e-8)) / kind(maximum)
    quantised = device_numbers.encode(values * (kind(1) / scale), device)
    codes, row_scales = expected_weight(weights, scales, device)
    product = device_numbers.decode(quantised, device) @ (
        device_numbers.decode(codes, device).T
    )
    out = layer(x)
    assert (out.dtype, out[0].count_nonzero()) == (dtype, 0)
    assert_close(out, product * scale.astype(np.float64) * row_scales)


def test_the_scales_of_every_projection_begin_anew():
    assert scale_rows([130, 5, 129], 128).tolist() == (
        [0] * 128 + [1] * 2 + [2] * 5 + [3] * 128 + [4]
    )


@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf])
def test_a_missing_or_impossible_scale_names_layer_and_key(value):
    weights, scales = checkpoint([256], 200)
    scales[0][1, 1] = math.nan if value is None else value
    with pytest.raises(ValueError, match=rf"{NAME}\.weight_scale_inv is"):
        load([256], 200, weights, None if value is None else scales, "gaudi3")


def test_projections_that_upstream_would_load_over_each_other_are_refused():
    check_fused(NAME, [200, 200, 200], False, (128, 128), 100)
    with pytest.raises(ValueError, match=rf"{NAME}.*\[130, 130, 130\]"):
        check_fused(NAME, [130, 130, 130], False, (128, 128), 100)


@pytest.mark.parametrize("widths, inputs", [([64], 256), ([128], 192)])
def test_ranks_that_cut_a_block_are_refused(widths, inputs):
    check_fused(NAME, widths, False, (128, 128), inputs)
    with pytest.raises(ValueError, match=f"{NAME}: tensor parallelism cuts"):
        check_fused(NAME, widths, True, (128, 128), inputs)
