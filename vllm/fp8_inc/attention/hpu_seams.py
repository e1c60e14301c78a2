# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What patches/vllm_gaudi calls in the attention classes of the HPU worker."""

from typing import Any

from torch import nn

from vllm.config import get_current_vllm_config
from vllm.fp8_inc.attention import mha_hpu, mla_hpu
from vllm.fp8_inc.hpu_device import hpu_format
from vllm.fp8_inc.hpu_worker import is_measured
from vllm.fp8_inc.settings import Settings


def mla_paged_attention(impl: nn.Module, upstream: Any) -> Any:
    """Whose forward_decode an HPUMLAImpl calls; the last line of its __init__.

    Gives it our pieces, as ``impl.fp8_inc``, where its cache is FP8. INC knows modules
    by the names of their classes, and so leaves ours alone.

    Args:
        impl: The HPUMLAImpl.
        upstream: HPUPagedAttention, which serves every other cache, and while INC
            measures.
    """
    return _paged_attention(impl, upstream, mla_hpu.install)


def mha_paged_attention(impl: nn.Module, upstream: Any) -> Any:
    """As mla_paged_attention, for an HPUAttentionImpl."""
    return _paged_attention(impl, upstream, mha_hpu.install)


def _paged_attention(impl: nn.Module, upstream: Any, install: Any) -> Any:
    if impl.kv_cache_dtype != "fp8_inc" or is_measured():
        return upstream
    impl.enable_fp8_attn = True  # the worker leaves it out where QUANT_CONFIG is set
    settings = Settings.of(get_current_vllm_config())
    impl.fp8_inc = install(impl, hpu_format(), settings.hpu_matmul)
    return impl.fp8_inc.decode
