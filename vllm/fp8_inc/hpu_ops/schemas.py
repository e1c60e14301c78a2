# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The schemas of the operators, as gaudi-pytorch-bridge 1.19 registers them.

Newer builds append ``window_size`` and ``sinks`` to fp8_sdpa_recomp_fwd; their types
are inferred from the HPU worker's calls. With defaults both arities can be called.
"""

_CAST_TAIL = (
    "bool stochastic_rounding=False, bool is_amax=False, ScalarType dtype=None, "
    "int[]? scale_shape=None) -> (Tensor, Tensor)"
)
_UNCAST_TAIL = "ScalarType out_dtype, int[]? scale_shape=None) -> Tensor"
_GEMM_HEAD = (
    "Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
)
_GEMM_TAIL = (
    "Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor"
)
_SDPA_HEAD = (
    "Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, "
    "bool is_causal, bool requires_backward, str softmax_mode, "
)
_SDPA_AMAX = (
    "bool is_amax_s, bool is_amax_0, Tensor? valid_seq_len, str seq_padding_type"
)
_SDPA_NEWER = ", SymInt[]? window_size=None, Tensor? sinks=None"
_SDPA_SCALES = (
    "d_scale_q", "d_scale_k", "d_scale_v", "q_scale_s", "q_scale_o", "d_scale_s"
)  # fmt: skip
_SIX = ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _sdpa(kind: str) -> str:
    scales = ", ".join(f"{kind} {name}" for name in _SDPA_SCALES)
    return f"{_SDPA_HEAD}{scales}, {_SDPA_AMAX}{_SDPA_NEWER}{_SIX}"


CAST_TO_FP8 = {
    "cast_to_fp8_v2": f"Tensor input, Tensor? scale=None, {_CAST_TAIL}",
    "cast_to_fp8_v2.scalar": f"Tensor input, float scale, {_CAST_TAIL}",
    "cast_to_fp8_v2.scalar_list": f"Tensor input, float[] scale, {_CAST_TAIL}",
}
CAST_FROM_FP8 = {
    "cast_from_fp8": f"Tensor input, Tensor? scale, {_UNCAST_TAIL}",
    "cast_from_fp8.scalar": f"Tensor input, float scale, {_UNCAST_TAIL}",
    "cast_from_fp8.scalar_list": f"Tensor input, float[] scale, {_UNCAST_TAIL}",
}
FP8_GEMM = {
    "fp8_gemm_v2": f"{_GEMM_HEAD}Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, "
    f"{_GEMM_TAIL}",
    "fp8_gemm_v2.scalar": f"{_GEMM_HEAD}float A_scale_inv, float B_scale_inv, "
    f"{_GEMM_TAIL}",
    "fp8_gemm_v2.scalar_list": f"{_GEMM_HEAD}float[] A_scale_inv, "
    f"float[] B_scale_inv, {_GEMM_TAIL}",
}
SDPA = {
    "sdpa_recomp_fwd": f"{_SDPA_HEAD}Tensor? valid_seq_len, str seq_padding_type) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
}
FP8_SDPA = {
    "fp8_sdpa_recomp_fwd": _sdpa("Tensor?"),
    "fp8_sdpa_recomp_fwd.scalar": _sdpa("float"),
}
