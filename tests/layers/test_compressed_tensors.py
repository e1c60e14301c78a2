# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which part of a compressed-tensors configuration is ours, by cache dtype."""

from unittest import mock

import pytest

from tests.checkpoints import quantization_config
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.fp8_inc.layers.compressed_tensors import Fp8IncCompressedTensorsConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsKVCacheMethod,
)


@pytest.mark.parametrize(
    "cache, upstream",
    [("auto", False), ("bfloat16", False), ("fp8_inc", False), ("fp8", True)],
)
def test_upstream_loads_the_scales_of_its_own_fp8_cache(cache, upstream):
    declared = quantization_config()
    config = Fp8IncCompressedTensorsConfig.from_config(declared)
    served = VllmConfig(cache_config=CacheConfig(cache_dtype=cache))
    with set_current_vllm_config(served):
        method = config.get_quant_method(mock.Mock(spec=Attention), "layer")
        scheme = config.kv_cache_scheme
    assert isinstance(method, CompressedTensorsKVCacheMethod) == upstream
    assert scheme == (declared["kv_cache_scheme"] if upstream else None)
