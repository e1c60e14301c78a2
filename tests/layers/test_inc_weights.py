# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""bf16 weights become the FP8 weights that INC would make of them."""

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.sources.inc.helpers import cached, measured, read, write_file
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.layers.gemm import fp8_linear
from vllm.fp8_inc.layers.inc_weights import quantise_experts, quantise_linear

PATH = "model.layers.2.mlp.down_proj"
MOE = "model.layers.2.mlp.experts.moe_op"
DTYPES = {"gaudi2": ml_dtypes.float8_e4m3, "gaudi3": ml_dtypes.float8_e4m3fn}
FULL_SCALE = {"gaudi2": 240.0, "gaudi3": 448.0}


def bf16(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).bfloat16()


def amax(weight):
    return weight.abs().max().item()


def values(codes, device):
    """float32 values of FP8 codes, by ml_dtypes."""
    return codes.view(torch.uint8).numpy().view(DTYPES[device]).astype(np.float32)


def check(codes, scale, weight, device):
    """Each value is the FP8 number next to w / s, and s fills half of the range."""
    w, s = weight.float().numpy(), scale.numpy()[:, None]
    expected = (w / s).astype(DTYPES[device]).astype(np.float32)
    np.testing.assert_array_equal(values(codes, device), expected)
    assert np.abs(expected).max() > FULL_SCALE[device] / 64


@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
@pytest.mark.parametrize(
    "method, channels",
    [
        ("maxabs_hw", 1),
        ("maxabs_pow2", 1),
        ("ACT_MAXABS_HW_WEIGHTS_PCS_MAXABS_POW2", 6),
    ],
)
def test_a_linear_layer(tmp_path, method, channels, device):
    weight = bf16(6, 32) * torch.tensor([[0.5], [1], [2], [4], [8], [16]]).bfloat16()
    write_file(tmp_path, {PATH: measured(9.75, weight=amax(weight))})
    inc = read(tmp_path, device, scale_method=method)
    made = quantise_linear(inc, PATH, "RowParallelLinear", weight, FORMATS[device])
    assert made.weight_scale.shape == (6,)
    assert len(set(made.weight_scale.tolist())) >= min(channels, 4)
    check(made.weight, made.weight_scale, weight, device)
    assert made.input_quant_scale == 1 / inc.linears[PATH].input_dequant_scale
    x = bf16(5, 32, seed=2)
    result = fp8_linear(
        x, made.weight, made.weight_scale, made.input_quant_scale, None, device
    )
    exact = x.float() @ weight.float().T
    assert (result.float() - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize(
    "method, scale", [("unit_scale", 1), ("hw_aligned_single_scale", 128)]
)
def test_fixed_scales(tmp_path, method, scale):
    inc = read(tmp_path, scale_method=method)
    weight = bf16(4, 16) * 64
    made = quantise_linear(inc, PATH, "RowParallelLinear", weight, FORMATS["gaudi3"])
    assert made.weight_scale.tolist() == [scale] * 4
    assert made.input_quant_scale == 1 / scale


def test_what_stays_as_it_is(tmp_path):
    write_file(tmp_path, {PATH: measured(9.75, weight=4.0), "lm_head": measured(1.0)})
    inc = read(tmp_path, blocklist={"names": ["layers\\.2\\."], "types": ["Linear"]})
    fmt = FORMATS["gaudi3"]
    assert quantise_linear(inc, PATH, "RowParallelLinear", bf16(2, 4), fmt) is None
    assert quantise_linear(inc, "a.b", "Linear", bf16(2, 4), fmt) is None
    assert quantise_linear(inc, "a.b", "Conv3dLayer", bf16(2, 4), fmt) is None
    assert quantise_experts(inc, MOE, bf16(1, 4, 2), bf16(1, 2, 2), [0], fmt) is None


def test_a_layer_that_was_not_measured(tmp_path):
    write_file(tmp_path, {PATH: measured(9.75, weight=4.0)})
    fmt = FORMATS["gaudi3"]
    with pytest.raises(ValueError, match="layers.3.down_proj is to be quantised and"):
        quantise_linear(read(tmp_path), "layers.3.down_proj", "Linear", bf16(2, 4), fmt)
    with pytest.raises(ValueError, match="layers.3.moe_op is to be quantised and"):
        quantise_experts(
            read(tmp_path), "layers.3.moe_op", bf16(1, 4, 2), bf16(1, 2, 2), [0], fmt
        )
    inc = read(tmp_path, ignore_modules_wo_measures=True)
    assert quantise_linear(inc, "layers.3.down_proj", "Linear", bf16(2, 4), fmt) is None


@pytest.mark.parametrize(
    "scale, part",
    [
        ({"0": [0.5, 0.25, 1.0]}, "has 3 weight scales, but 2 output channels"),
        (2.0**-12, "but gaudi3 ends at 448"),
    ],
)
def test_scales_of_another_model(tmp_path, scale, part):
    write_file(tmp_path, {PATH: cached(0.5, weight=scale)}, "_MAXABS_HW", "Scale")
    with pytest.raises(ValueError) as error:
        quantise_linear(
            read(tmp_path), PATH, "RowParallelLinear", bf16(2, 8), FORMATS["gaudi3"]
        )
    assert PATH in str(error.value) and part in str(error.value)
    assert "of another model" in str(error.value)


def test_opt_weights_need_the_cached_file(tmp_path):
    write_file(tmp_path, {PATH: measured(9.75, weight=4.0)})
    inc = read(tmp_path, scale_method="maxabs_hw_opt_weight")
    with pytest.raises(ValueError, match=f"quant.json: {PATH}: a weight scale of the"):
        quantise_linear(inc, PATH, "RowParallelLinear", bf16(2, 8), FORMATS["gaudi3"])


def test_dynamic_layers_are_refused(tmp_path):
    inc = read(
        tmp_path,
        dynamic_quantization=True,
        scale_method="maxabs_pcs_pow2",
        blocklist={"types": ["VLLMKVCache"]},
    )
    with pytest.raises(
        ValueError, match='quant.json: "dynamic_quantization" of Linear'
    ):
        quantise_linear(inc, PATH, "RowParallelLinear", bf16(2, 8), FORMATS["gaudi3"])


def moe(w13, w2, inner):
    nodes = {MOE: measured(7.0, outputs=[1.0, *inner])}
    for e in range(len(w13)):
        nodes[f"{MOE}.w13_list.{e}"] = measured(0.0, weight=amax(w13[e]))
        nodes[f"{MOE}.w2_list.{e}"] = measured(0.0, weight=amax(w2[e]))
    return nodes


@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
def test_experts(tmp_path, device):
    """Rank 1 of 2 holds experts 3 to 5; 4 was never visited."""
    size = torch.tensor([1, 8, 64]).bfloat16()[:, None, None]
    w13, w2 = bf16(3, 8, 16) * size, bf16(3, 16, 4, seed=3) / size
    for rank, inner in enumerate(([1.0, 1.0, 1.0], [0.5, 0.0, 57.0])):
        write_file(tmp_path, moe(w13, w2, inner), f"_{rank}_2")
    inc = read(tmp_path, device, 1, 2, num_experts=6)
    made = quantise_experts(inc, MOE, w13, w2, [3, 4, 5], FORMATS[device])
    for e in range(3):
        check(made.w13_weight[e], made.w13_weight_scale[e], w13[e], device)
        check(made.w2_weight[e], made.w2_weight_scale[e], w2[e], device)
    inner = inc.experts[MOE].intermediate
    assert inner[3] < inner[5] and inner[4] == 0
    expected = [1 / inner[3], 1 / inner[5], 1 / inner[5]]
    assert made.w2_input_quant_scale.tolist() == expected
    assert made.w13_input_quant_scale == 1 / inc.experts[MOE].input_dequant_scale
    with pytest.raises(ValueError, match=r"has no scales for experts \[2\]"):
        quantise_experts(inc, MOE, w13, w2, [2, 3, 4], FORMATS[device])
