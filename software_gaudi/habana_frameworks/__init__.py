# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Stands in for Intel Gaudi's habana_frameworks where there is no Gaudi."""
