# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Registers the fork's parts with vLLM; an entry point of vllm.general_plugins."""

import functools


@functools.cache
def register() -> None:
    """Registers what has a registration point, once a process.

    vLLM calls it in every process. The seams in patches/vllm call it too, so that
    VLLM_PLUGINS, which can leave entry points out, does not make a server run
    without us in silence.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.v1.attention.backends.mla.prefill import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )

    # Where a platform has no device capability vLLM takes FLASH_ATTN.
    register_mla_prefill_backend(
        MLAPrefillBackendEnum.FLASH_ATTN,
        "vllm.fp8_inc.attention.mla_cpu.CPUMLAPrefillBackend",
    )
    from vllm.fp8_inc.layers.compressed_tensors import Fp8IncCompressedTensorsConfig
    from vllm.fp8_inc.layers.fp8 import Fp8IncFp8Config

    register_quantization_config("compressed-tensors")(Fp8IncCompressedTensorsConfig)
    register_quantization_config("fp8")(Fp8IncFp8Config)
