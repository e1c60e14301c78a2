# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Attention over unquantised operands."""

from soft_gaudi.kernels import (  # noqa: F401
    FusedSDPA,
    gqa_input_reshape_fwd,
    gqa_output_reshape,
    is_gqa,
)
