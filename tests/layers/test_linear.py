# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8-static Linear layers compute the device's numbers from a checkpoint's tensors."""

import functools
import math

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize

from tests import device_numbers
from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.layers.linear import Fp8LinearScheme, PlainLinearMethod
from vllm.fp8_inc.layers.recipe import Fp8Recipe

WIDTHS, COLUMNS, TOKENS = [16, 8, 24], 32, 6
SIZES = [0.05, 1.0, 7.0]
INPUT_SCALES = [0.011, 0.0317, 0.023]
# One rounding to the activation dtype, and float32 accumulation.
RTOL = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-5}
STRATEGIES = pytest.mark.parametrize("strategy", ["tensor", "channel"])
DEVICES = pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])


def adjustment(quantised_for, served_on):
    return Adjustment(FORMATS[quantised_for], FORMATS[served_on], "as the test says")


class Checkpoint:
    """Three fused projections whose weights and scales all differ."""

    def __init__(self, fp8_weight, strategy, made_for):
        self.strategy, self.made_for = strategy, made_for
        maximum = device_numbers.MAXIMUM[made_for]
        self.parts = [
            fp8_weight(width, COLUMNS, strategy, maximum, size, seed)
            for seed, (width, size) in enumerate(zip(WIDTHS, SIZES, strict=True))
        ]
        self.weight = torch.cat([codes.view(torch.uint8) for codes, _ in self.parts])
        self.weight = self.weight.view(torch.float8_e4m3fn)

    @property
    def channel_scales(self):
        """float64 [out]: what each row of the weight is multiplied with."""
        scales = [s.expand(len(codes), 1) for codes, s in self.parts]
        return torch.cat(scales).flatten().double().numpy()

    def dequantized(self):
        """float32 [out, in], by compressed-tensors."""
        args = QuantizationArgs(num_bits=8, type="float", strategy=self.strategy)
        return torch.cat(
            [
                dequantize(codes, s, args=args, dtype=torch.float32)
                for codes, s in self.parts
            ]
        )

    def load(self, served_on, dtype=torch.bfloat16, **changes):
        """A layer after loading.

        ``changes`` replace the second of its scales by a value, or by nothing.
        """
        layer = torch.nn.Module()
        scheme = Fp8LinearScheme(
            Fp8Recipe(self.strategy, True, adjustment(self.made_for, served_on)),
            "model.layers.4.self_attn.qkv_proj",
        )
        scheme.create_weights(
            layer,
            input_size=COLUMNS,
            input_size_per_partition=COLUMNS,
            output_partition_sizes=WIDTHS,
            output_size=sum(WIDTHS),
            params_dtype=dtype,
            weight_loader=None,
        )
        scales = torch.cat([scale for _, scale in self.parts])
        for name, values in {
            "weight": self.weight,
            "weight_scale": scales,
            "input_scale": torch.tensor(INPUT_SCALES),
        }.items():
            target = getattr(layer, name).data
            not_loaded = target[1].clone()
            target.copy_(values)
            if name in changes:
                value = changes[name]
                target[1] = not_loaded if value is None else value
        scheme.process_weights_after_loading(layer)
        layer.forward = functools.partial(scheme.apply_weights, layer, bias=None)
        layer.scheme = scheme
        return layer

    def expected(self, x, served_on):
        """float64 product; the largest input scale serves all projections."""
        maxima = device_numbers.MAXIMUM
        input_scale = max(INPUT_SCALES) * maxima[self.made_for] / maxima[served_on]
        product = device_numbers.gemm(x, self.weight, input_scale, served_on)
        return product * self.channel_scales


def activations(dtype=torch.bfloat16):
    """Most on the grid, a few beyond amax of either device."""
    generator = torch.Generator().manual_seed(11)
    return (torch.randn(TOKENS, COLUMNS, generator=generator) * 6).to(dtype)


def assert_close(got, expected):
    atol = 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(
        got.double().numpy(), expected, rtol=RTOL[got.dtype], atol=atol
    )


@STRATEGIES
@DEVICES
@pytest.mark.parametrize("made_for", ["gaudi2", "gaudi3"])
@pytest.mark.parametrize("dtype", list(RTOL))
def test_fused_projections_keep_their_own_scales(
    fp8_weight, strategy, device, made_for, dtype
):
    checkpoint = Checkpoint(fp8_weight, strategy, made_for)
    x = activations(dtype)
    out = checkpoint.load(device, dtype)(x)
    assert (out.dtype, out.shape) == (dtype, (TOKENS, sum(WIDTHS)))
    assert_close(out, checkpoint.expected(x, device))


def test_the_devices_differ_where_an_activation_saturates(fp8_weight):
    checkpoint = Checkpoint(fp8_weight, "tensor", "gaudi3")
    x = torch.full((1, COLUMNS), 0.0317 * 300).bfloat16()
    on = {device: checkpoint.load(device)(x) for device in FORMATS}
    for device, out in on.items():
        assert_close(out, checkpoint.expected(x, device))
    # The adjusted scale keeps 300 of 448 as 160 of 240: nothing is lost.
    torch.testing.assert_close(on["gaudi2"], on["gaudi3"], rtol=0.05, atol=0.01)
    made_for_240 = Checkpoint(fp8_weight, "tensor", "gaudi2")
    clipped = made_for_240.load("gaudi2")(x)
    assert_close(clipped, made_for_240.expected(x, "gaudi2"))
    assert torch.equal(made_for_240.load("gaudi2")(x * 4), clipped)


@STRATEGIES
def test_a_448_checkpoint_on_gaudi2_is_halved_and_its_scales_doubled(
    fp8_weight, strategy
):
    checkpoint = Checkpoint(fp8_weight, strategy, "gaudi3")
    assert (device_numbers.to_numpy(checkpoint.weight) & 0x7F).max() > 0x77
    layer = checkpoint.load("gaudi2")
    codes = device_numbers.to_numpy(layer.weight)
    values = device_numbers.decode(device_numbers.to_numpy(checkpoint.weight), "gaudi3")
    np.testing.assert_array_equal(codes, device_numbers.encode(values / 2, "gaudi2"))
    assert (codes & 0x7F).max() <= 0x77
    scales = layer.weight_scale.double().numpy()
    np.testing.assert_array_equal(scales, 2 * checkpoint.channel_scales)
    factor = float(layer.input_quant_scale) * max(INPUT_SCALES)
    assert factor == pytest.approx(240 / 448, rel=2**-8)


@STRATEGIES
@DEVICES
def test_a_240_checkpoint_keeps_its_weights_on_both_devices(
    fp8_weight, strategy, device
):
    checkpoint = Checkpoint(fp8_weight, strategy, "gaudi2")
    layer = checkpoint.load(device)
    codes = device_numbers.to_numpy(layer.weight)
    np.testing.assert_array_equal(codes, device_numbers.to_numpy(checkpoint.weight))
    scales = layer.weight_scale.double().numpy()
    np.testing.assert_array_equal(scales, checkpoint.channel_scales)
    factor = float(layer.input_quant_scale) * max(INPUT_SCALES)
    assert factor == pytest.approx(device_numbers.MAXIMUM[device] / 240, rel=2**-8)


def test_weights_above_240_called_made_for_240_are_an_error_on_gaudi2(fp8_weight):
    checkpoint = Checkpoint(fp8_weight, "tensor", "gaudi3")
    checkpoint.made_for = "gaudi2"
    with pytest.raises(ValueError, match=r"qkv_proj\.weight .*0x7e.*fp8_dtype_flavor"):
        checkpoint.load("gaudi2")


@STRATEGIES
@pytest.mark.parametrize("name", ["weight_scale", "input_scale"])
@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf])
def test_a_missing_or_impossible_scale_is_an_error_that_names_layer_and_key(
    fp8_weight, strategy, name, value
):
    checkpoint = Checkpoint(fp8_weight, strategy, "gaudi3")
    with pytest.raises(ValueError) as error:
        checkpoint.load("gaudi3", **{name: value})
    assert f"model.layers.4.self_attn.qkv_proj.{name}" in str(error.value)
    assert value is None or f"{value:g}" in str(error.value)


@STRATEGIES
@DEVICES
def test_the_dequantized_weight_is_compressed_tensors_own(fp8_weight, strategy, device):
    checkpoint = Checkpoint(fp8_weight, strategy, "gaudi3")
    weight = checkpoint.load(device).dequantized_weight(torch.float32)
    expected = checkpoint.dequantized()
    if device == "gaudi2":
        # Halving rounds odd denormals; everything else is exact.
        codes = device_numbers.to_numpy(checkpoint.weight) & 0x7F
        exact = torch.from_numpy((codes >= 0x10) | (codes % 2 == 0))
        assert exact.float().mean() > 0.9
        weight, expected = weight[exact], expected[exact]
    assert torch.equal(weight, expected)
    narrow = checkpoint.load(device).dequantized_weight(torch.bfloat16)
    assert narrow.dtype == torch.bfloat16


def test_a_bias_is_added_after_the_scales(fp8_weight):
    checkpoint = Checkpoint(fp8_weight, "tensor", "gaudi3")
    layer, x = checkpoint.load("gaudi3", torch.float32), activations(torch.float32)
    bias = torch.linspace(-3, 40, sum(WIDTHS))
    out = layer.scheme.apply_weights(layer, x, bias)
    assert_close(out, checkpoint.expected(x, "gaudi3") + bias.double().numpy())


def test_leading_dimensions_and_no_tokens_are_kept(fp8_weight):
    layer = Checkpoint(fp8_weight, "tensor", "gaudi3").load("gaudi3")
    x = activations()
    folded = layer(x.view(2, 3, COLUMNS))
    assert torch.equal(folded.view(TOKENS, -1), layer(x))
    assert layer(x[:0]).shape == (0, sum(WIDTHS))


@DEVICES
def test_compiled_is_bit_identical_to_eager(fp8_weight, device):
    """Inductor must not fuse the cast: it would drop the bf16 product's rounding."""
    layer = Checkpoint(fp8_weight, "channel", "gaudi3").load(device)

    def forward(x):
        return layer(x * 2).relu()

    x = torch.linspace(-9, 9, 64 * COLUMNS).view(64, COLUMNS).bfloat16()
    compiled = torch.compile(forward, fullgraph=True, backend="inductor")(x)
    assert torch.equal(compiled.view(torch.int16), forward(x).view(torch.int16))


def test_a_plain_layer_keeps_its_weight_for_mla():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
    method = PlainLinearMethod()
    method.process_weights_after_loading(layer)
    x, bias = torch.tensor([[1.0, -1.0, 2.0]]), torch.tensor([0.5, -0.5])
    assert layer.weight.shape == (2, 3)
    assert method.apply(layer, x, bias).tolist() == [[3.5, 8.5]]


def test_a_plain_layer_rounds_its_result_only():
    """In bfloat16, on any CPU; with oneDNN's bfloat16 or in float32."""
    layer = torch.nn.Module()
    weight = torch.randn(48, 256).bfloat16()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    x, bias = torch.randn(40, 256).bfloat16(), torch.randn(48).bfloat16()
    out = PlainLinearMethod().apply(layer, x, bias)
    exact = x.double() @ weight.double().T + bias.double()
    assert out.dtype == torch.bfloat16
    bound = 2.0**-8 * exact.abs() + 1e-5 * exact.abs().max()
    assert ((out.double() - exact).abs() <= bound).all()
