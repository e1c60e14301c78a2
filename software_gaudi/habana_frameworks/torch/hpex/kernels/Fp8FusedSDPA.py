# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Attention over FP8 operands."""

from soft_gaudi.kernels import (  # noqa: F401
    fp8_fused_sdpa,
    gqa_input_reshape_fwd,
    gqa_output_reshape,
    is_gqa,
)
