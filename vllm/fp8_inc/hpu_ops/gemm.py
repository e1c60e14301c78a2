# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""hpu.fp8_gemm_v2 in software: exact products, float32 sums, one rounding."""

import torch

from vllm.fp8_inc.hpu_ops.emulation import emulated_format
from vllm.fp8_inc.hpu_ops.scale_arguments import ScaleArgument, scale_tensor


def fp8_gemm(
    A: torch.Tensor,
    trans_A: bool,
    B: torch.Tensor,
    trans_B: bool,
    D: torch.Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: ScaleArgument = None,
    B_scale_inv: ScaleArgument = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    B_scale_shape: list[int] | None = None,
) -> torch.Tensor:
    """(A @ B) * A_scale_inv * B_scale_inv + bias, + D where accumulated.

    Args:
        A: FP8 [..., M, K]; [..., K, M] with ``trans_A``.
        B: FP8 [..., K, N]; [..., N, K] with ``trans_B``. Batches broadcast.
        D: [..., M, N], added where ``accumulate``.
        out_dtype: bfloat16, float16 or float32.
        A_scale_inv: Dequant scale of A: one, or one a row ([M] or [M, 1]).
        B_scale_inv: Dequant scale of B: one, or one a column ([N] or [1, N]).
        bias: [N] or [..., M, N].
        B_scale_shape: Shape in which ``B_scale_inv`` broadcasts to the product.

    Returns:
        [..., M, N] in ``out_dtype``.
    """
    decode = emulated_format().decode
    a, b = decode(A.view(torch.uint8)), decode(B.view(torch.uint8))
    product = torch.matmul(a.mT if trans_A else a, b.mT if trans_B else b)
    rows = scale_tensor(A_scale_inv, A)
    if rows is not None:
        per_row = rows.dim() == 1 and rows.numel() > 1
        product = product * (rows[:, None] if per_row else rows).float()
    columns = scale_tensor(B_scale_inv, B, B_scale_shape)
    if columns is not None:
        product = product * columns.float()
    if bias is not None:
        product = product + bias.float()
    if accumulate and D is not None:
        product = product + D.float()
    return product.to(out_dtype)


def fp8_gemm_shapes(
    A, trans_A, B, trans_B, D, out_dtype, A_scale_inv=None, B_scale_inv=None,
    bias=None, accumulate=False, B_scale_shape=None,
):  # fmt: skip
    """What fp8_gemm returns, without values."""
    rows = A.shape[-1] if trans_A else A.shape[-2]
    columns = B.shape[-2] if trans_B else B.shape[-1]
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return A.new_empty((*batch, rows, columns), dtype=out_dtype)
