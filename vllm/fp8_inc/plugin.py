# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Registers the fork's parts with vLLM; an entry point of vllm.general_plugins."""

import functools
import importlib

# quant_method -> module of layers/, and its class that takes upstream's place.
QUANT_METHODS = {
    "compressed-tensors": ("compressed_tensors", "Fp8IncCompressedTensorsConfig"),
    "fp8": ("fp8", "Fp8IncFp8Config"),
    "inc": ("inc", "Fp8IncINCConfig"),  # vLLM calls auto-round so too
    "modelopt": ("modelopt", "Fp8IncModelOptConfig"),
    "modelopt_mixed": ("modelopt", "Fp8IncModelOptMixedConfig"),
    "quark": ("quark", "Fp8IncQuarkConfig"),
}


@functools.cache
def register() -> None:
    """Registers what has a registration point, once a process.

    vLLM calls it in every process. The seams in patches/vllm call it too, so that
    VLLM_PLUGINS, which can leave entry points out, does not make a server run
    without us in silence.
    """
    from vllm.fp8_inc.parent import follow_parent
    from vllm.platforms import current_platform

    follow_parent()

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
    for quant_method, (module, name) in QUANT_METHODS.items():
        config = getattr(importlib.import_module(f"vllm.fp8_inc.layers.{module}"), name)
        register_quantization_config(quant_method)(config)
