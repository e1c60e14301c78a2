# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Lazy or eager."""

from soft_gaudi.chip import is_lazy  # noqa: F401
