# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Fused attention and rotation.

FusedSDPA is a module here and a class in it: the class wins, as in the original.
"""

from soft_gaudi.kernels import (  # noqa: F401
    RotaryPosEmbeddingMode,
    apply_rotary_pos_emb,
)

from .Fp8FusedSDPA import fp8_fused_sdpa  # noqa: F401
from .FusedSDPA import FusedSDPA  # noqa: F401
