# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The operators' schemas, their fake kernels, and who may define them."""

import pytest
import torch

from vllm.fp8_inc import hpu_ops
from vllm.fp8_inc.hpu_ops import emulation, registration

FP8 = torch.float8_e4m3fn
_SDPA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, "
    "bool is_causal, bool requires_backward, str softmax_mode, "
)
# Of gaudi-pytorch-bridge 1.19.
BRIDGE = [
    "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, "
    "bool is_amax=False, ScalarType dtype=None, int[]? scale_shape=None) -> "
    "(Tensor, Tensor)",
    "cast_to_fp8_v2.scalar(Tensor input, float scale, bool stochastic_rounding=False, "
    "bool is_amax=False, ScalarType dtype=None, int[]? scale_shape=None) -> "
    "(Tensor, Tensor)",
    "cast_to_fp8_v2.scalar_list(Tensor input, float[] scale, "
    "bool stochastic_rounding=False, bool is_amax=False, ScalarType dtype=None, "
    "int[]? scale_shape=None) -> (Tensor, Tensor)",
    "cast_from_fp8(Tensor input, Tensor? scale, ScalarType out_dtype, "
    "int[]? scale_shape=None) -> Tensor",
    "cast_from_fp8.scalar(Tensor input, float scale, ScalarType out_dtype, "
    "int[]? scale_shape=None) -> Tensor",
    "cast_from_fp8.scalar_list(Tensor input, float[] scale, ScalarType out_dtype, "
    "int[]? scale_shape=None) -> Tensor",
    "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, "
    "ScalarType out_dtype, Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, "
    "Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor",
    "fp8_gemm_v2.scalar(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, "
    "ScalarType out_dtype, float A_scale_inv, float B_scale_inv, "
    "Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor",
    "fp8_gemm_v2.scalar_list(Tensor A, bool trans_A, Tensor B, bool trans_B, "
    "Tensor? D, ScalarType out_dtype, float[] A_scale_inv, float[] B_scale_inv, "
    "Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor",
    f"sdpa_recomp_fwd{_SDPA}Tensor? valid_seq_len, str seq_padding_type) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
]
FP8_SDPA = (
    f"fp8_sdpa_recomp_fwd{_SDPA}Tensor? d_scale_q, Tensor? d_scale_k, "
    "Tensor? d_scale_v, Tensor? q_scale_s, Tensor? q_scale_o, Tensor? d_scale_s, "
    "bool is_amax_s, bool is_amax_0, Tensor? valid_seq_len, str seq_padding_type) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def overload(name):
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.hpu, packet), kind or "default")


@pytest.mark.parametrize("schema", BRIDGE)
def test_schemas_are_the_bridges(schema):
    registered = overload(schema.split("(")[0])._schema
    assert str(registered) == str(torch._C.parse_schema(f"hpu::{schema}"))


@pytest.mark.parametrize("kind", ["Tensor?", "float"])
def test_sdpa_has_the_arguments_of_both_builds(kind):
    name = "fp8_sdpa_recomp_fwd" + (".scalar" if kind == "float" else "")
    scales = "Tensor? d_scale_q, Tensor? d_scale_k, Tensor? d_scale_v, "
    scales += "Tensor? q_scale_s, Tensor? q_scale_o, Tensor? d_scale_s"
    text = FP8_SDPA.replace(scales, scales.replace("Tensor?", kind))
    older = torch._C.parse_schema(text)
    newer = overload(name)._schema
    assert [(a.name, str(a.type)) for a in newer.arguments[:19]] == [
        (a.name, str(a.type)) for a in older.arguments
    ]
    assert [a.name for a in newer.arguments[19:]] == ["window_size", "sinks"]
    assert all(a.has_default_value() for a in newer.arguments[19:])
    assert len(newer.returns) == len(older.returns)


def test_a_loaded_bridge_is_left_alone(monkeypatch):
    """Operators that are there already, whoever defined them, are not defined again."""
    monkeypatch.setattr(registration, "_library", None)
    assert hpu_ops.register() is False
    assert registration._library is None


def test_no_device_is_guessed():
    with hpu_ops.emulate("gaudi2"):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "_format", None)
        with pytest.raises(RuntimeError, match="choose the device"):
            torch.ops.hpu.cast_to_fp8_v2(torch.ones(2), None, False, False, FP8)
    with pytest.raises(ValueError, match="gaudi1"):
        hpu_ops.set_device("gaudi1")


@pytest.mark.parametrize("name", ["gemm", "sdpa", "sdpa_fp8"])
def test_traced_and_eager_agree(device, name):
    """Under fake tensors shapes and dtypes are right, so that the graph is whole."""

    def gemm(x, scale):
        codes, amax = torch.ops.hpu.cast_to_fp8_v2(x, scale, False, True, FP8)
        product = torch.ops.hpu.fp8_gemm_v2(
            codes[:, :1], False, codes, True, None, torch.float32, scale, scale
        )
        values = torch.ops.hpu.cast_from_fp8(codes, scale, torch.bfloat16)
        return product * 2, values + 1, amax + 1

    def sdpa(x, scale):
        out = torch.ops.hpu.sdpa_recomp_fwd(
            x, x, x[..., :16], None, 0.0, 0.3, True, False, "fast", None, "right"
        )
        return [each + 1 for each in out]

    def sdpa_fp8(x, scale):
        codes = torch.ops.hpu.cast_to_fp8_v2(x, scale, False, False, FP8)[0]
        out = torch.ops.hpu.fp8_sdpa_recomp_fwd(
            codes, codes, codes[..., :16], None, 0.0, 0.3, True, False, "fast",
            scale, scale, scale, scale, None, scale, True, True, None, "right",
        )  # fmt: skip
        return [each + 1 for each in out]

    function = {"gemm": gemm, "sdpa": sdpa, "sdpa_fp8": sdpa_fp8}[name]
    x = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.tensor(1.3)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for eager, traced in zip(function(x, scale), compiled(x, scale), strict=True):
        assert eager.dtype == traced.dtype and eager.shape == traced.shape
        torch.testing.assert_close(eager, traced, rtol=0, atol=0)
