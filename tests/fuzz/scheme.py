# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What quantization_config declares."""

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.nearly_right import ANYTHING, an_object, maybe
from vllm.fp8_inc.adjustment import resolve_adjustment
from vllm.fp8_inc.formats import GAUDI2
from vllm.fp8_inc.sources.checkpoint import declared_scheme

_SCHEME = {
    "num_bits": maybe(st.sampled_from([8, 8, 4])),
    "type": maybe(st.just("float")),
    "strategy": maybe(st.sampled_from(["tensor", "attn_head"])),
    "dynamic": maybe(st.just(False)),
    "symmetric": maybe(st.just(True)),
}
QUANTIZATION = an_object(
    {
        "quant_method": maybe(st.sampled_from(["compressed-tensors", "fp8", "quark"])),
        "kv_cache_scheme": maybe(an_object(_SCHEME)),
        "kv_cache_quant_algo": maybe(st.sampled_from(["FP8", "NVFP4"])),
        "quantization": maybe(
            an_object({"kv_cache_quant_algo": maybe(st.just("FP8"))})
        ),
        "export": maybe(an_object({"kv_cache_group": ANYTHING})),
        "fp8_dtype_flavor": maybe(
            st.sampled_from(["float8_e4m3fn", "float8_e4m3fnuz"])
        ),
        "provider": maybe(st.just("auto-round")),
    }
)


def declared(config: Any) -> None:
    declared_scheme(config)
    resolve_adjustment(config, GAUDI2, {})
