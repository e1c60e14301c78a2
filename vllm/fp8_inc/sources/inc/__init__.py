# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales from Intel Neural Compressor: QUANT_CONFIG and the files it points to.

``read`` is the way in. What INC does was read from neural-compressor-pt 3.10, which
is also the tests' oracle.
"""
