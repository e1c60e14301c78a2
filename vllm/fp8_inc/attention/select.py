# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which attention backend serves a layer on CPU; called by patches/vllm."""

from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none

if TYPE_CHECKING:
    from vllm.v1.attention.selector import AttentionSelectorConfig


def cpu_backend(config: "AttentionSelectorConfig") -> str | None:
    """Returns the path of our backend class, or None where upstream's serves.

    MLA is ours for every cache dtype, so that a bf16 and an FP8 cache differ in
    nothing but the cache. MHA and GQA are ours in an engine with fp8_inc only.

    Raises:
        ValueError: For a cache dtype or a kind of layer that neither serves.
    """
    from vllm.fp8_inc.plugin import register

    register()
    if config.use_mla and not config.use_sparse:
        if config.kv_cache_dtype not in (None, "auto", "bfloat16", "fp8_inc"):
            raise ValueError(
                f"--kv-cache-dtype {config.kv_cache_dtype}: MLA on CPU serves auto, "
                "bfloat16 and fp8_inc"
            )
        return "vllm.fp8_inc.attention.mla_cpu.CPUMLABackend"
    if config.kv_cache_dtype != "fp8_inc":
        engine = get_current_vllm_config_or_none()
        if engine is None or engine.cache_config.cache_dtype != "fp8_inc":
            return None
        # A layer of kv_cache_dtype_skip_layers among others with an FP8 cache.
        return "vllm.fp8_inc.attention.mha_unquantized.CPUUnquantizedBackend"
    if config.use_sparse:
        raise ValueError(
            "--kv-cache-dtype fp8_inc: sparse MLA is not supported; use auto"
        )
    if config.attn_type != "decoder":
        raise ValueError(
            f"--kv-cache-dtype fp8_inc: {config.attn_type} layers are not supported; "
            "serve this model with --kv-cache-dtype auto"
        )
    return "vllm.fp8_inc.attention.mha_cpu.CPUFp8Backend"
