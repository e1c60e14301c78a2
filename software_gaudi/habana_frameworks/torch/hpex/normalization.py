# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Fused normalisation."""

from soft_gaudi.kernels import FusedRMSNorm  # noqa: F401
