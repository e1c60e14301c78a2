# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Calibrated FP8 KV cache (``--kv-cache-dtype fp8_inc``) for Gaudi and any CPU."""
