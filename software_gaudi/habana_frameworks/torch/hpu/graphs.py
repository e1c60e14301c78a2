# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""HPU graphs."""

from soft_gaudi.graphs import input_hash, wrap_in_hpu_graph  # noqa: F401
