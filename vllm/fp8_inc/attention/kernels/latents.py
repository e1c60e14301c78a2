# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What MLA's kernels are told, and where latents are in a paged cache."""

import numpy as np
from numba import njit

from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.runtime import record_type

# Addresses; sizes in elements; strides (and ``own_size``) in bytes. ``own`` is memory
# of a thread, ``partial`` of the pieces; ``size`` is the latent's.
RECORD = record_type(
    "latent_query latent_query_sequence latent_query_head "
    "rope_query rope_query_sequence rope_query_head query_kind "
    "cache cache_block cache_row cache_kind max_code block_size "
    "table table_sequence lengths sequences heads size rope "
    "groups group piece pieces finished partial own own_size out out_kind",
    "logit_scale out_scale",
)


@njit
def row_of(a, table, token):
    """The address of a token in the cache."""
    block = np.int64(table[token // a.block_size])
    return a.cache + block * a.cache_block + token % a.block_size * a.cache_row


@njit
def prefetch(a, table, token, stop):
    """Asks for a token's row, if it is before ``stop``."""
    if token < stop:
        rows.prefetch_row(row_of(a, table, token), a.cache_row)
