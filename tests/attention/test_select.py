# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which backend serves, and what is refused."""

import pytest
import torch

from vllm.fp8_inc.attention.select import cpu_backend
from vllm.v1.attention.selector import AttentionSelectorConfig

MLA = "vllm.fp8_inc.attention.mla_cpu.CPUMLABackend"
MHA = "vllm.fp8_inc.attention.mha_cpu.CPUFp8Backend"


def config(cache, **options):
    return AttentionSelectorConfig(
        head_size=64,
        dtype=torch.bfloat16,
        kv_cache_dtype=cache,
        block_size=None,
        **options,
    )


@pytest.mark.parametrize(
    "cache, use_mla, backend",
    [
        ("auto", True, MLA),
        ("bfloat16", True, MLA),
        ("fp8_inc", True, MLA),
        ("fp8_inc", False, MHA),
        ("auto", False, None),
        ("fp8", False, None),
    ],
)
def test_backend_of_a_cache_dtype(cache, use_mla, backend):
    assert cpu_backend(config(cache, use_mla=use_mla)) == backend


@pytest.mark.parametrize(
    "cache, options, message",
    [
        ("fp8", {"use_mla": True}, "--kv-cache-dtype fp8: MLA on CPU"),
        ("fp8_inc", {"use_mla": True, "use_sparse": True}, "sparse MLA"),
        ("fp8_inc", {"attn_type": "encoder_only"}, "encoder_only layers"),
    ],
)
def test_what_is_not_served_is_refused(cache, options, message):
    with pytest.raises(ValueError, match=message):
        cpu_backend(config(cache, **options))
