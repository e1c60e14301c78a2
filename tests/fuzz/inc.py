# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""QUANT_CONFIG and the measurements it names."""

import json
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.nearly_right import ANYTHING, NUMBERS, a_file, an_object, deep, maybe
from vllm.fp8_inc.sources.inc.read import read_inc_scales

_LISTS = an_object(
    {
        "types": maybe(
            st.lists(st.sampled_from(["Linear", "VLLMKVCache"]), max_size=2)
        ),
        "names": maybe(st.lists(st.sampled_from(["k_cache", "a(b", "lm_head", ".*"]))),
    }
)
_METHODS = st.sampled_from(
    [
        "maxabs_hw",
        "maxabs_pow2",
        "MAXABS_ARBITRARY",
        "unit_scale",
        "act_maxabs_pcs_pow2",
    ]
)
_SOME_MODULES = [
    f"model.layers.{n}.self_attn.{at}"
    for n in (0, 1)
    for at in (
        *("attn.impl.k_cache", "attn.impl.v_cache", "attn.impl.matmul_qk"),
        *("mla_attn.mla_attn.impl.latent_cache_k", "o_proj"),
        "attn.impl.fused_scaled_dot_product_attention",
    )
]
QUANT_CONFIG = a_file(
    maybe(
        an_object(
            {
                "mode": maybe(st.sampled_from(["QUANTIZE", "quantize", "MEASURE"])),
                "observer": maybe(st.sampled_from(["maxabs", "maxabs_per_channel"])),
                "scale_method": maybe(
                    st.one_of(
                        _METHODS,
                        an_object(
                            {
                                "default": ANYTHING,
                                "layers": ANYTHING,
                                "nodes": maybe(
                                    st.dictionaries(
                                        st.sampled_from(_SOME_MODULES),
                                        ANYTHING,
                                        max_size=2,
                                    )
                                ),
                            }
                        ),
                    )
                ),
                "scale_params": ANYTHING,
                "device_for_scales": maybe(st.sampled_from(["GAUDI2", "GAUDI3"])),
                "dynamic_quantization": maybe(st.booleans()),
                "allowlist": maybe(_LISTS),
                "blocklist": maybe(_LISTS),
                "whitelist": _LISTS,
                "ignore_modules_wo_measures": maybe(st.booleans()),
            }
        )
    )
)
_NODE = an_object(
    {
        "inputs": maybe(st.lists(maybe(st.builds(deep, NUMBERS, st.integers(0, 2))))),
        "outputs": maybe(st.lists(NUMBERS, max_size=2)),
        "params": maybe(an_object({"weight": maybe(st.lists(NUMBERS, max_size=3))})),
    }
)
NODES = a_file(
    maybe(
        an_object(
            {
                "Mode": maybe(st.sampled_from(["DynamicRange", "Scale"])),
                "Nodes": maybe(
                    st.dictionaries(
                        st.sampled_from(_SOME_MODULES), maybe(_NODE), max_size=6
                    )
                ),
            }
        )
    )
)


def read_inc(data: tuple[bytes, bytes, bool]) -> None:
    content, nodes, cached = data
    with tempfile.TemporaryDirectory() as folder:
        stats = f"{folder}/inc_output"
        path = Path(folder) / "quant.json"
        named = b'{"dump_stats_path": ' + json.dumps(stats).encode()
        content = content.replace(b"{", named + b", " if b":" in content else named, 1)
        path.write_bytes(content)
        suffix = "_MAXABS_HW" if cached else ""
        Path(f"{stats}_hooks_maxabs{suffix}.json").write_bytes(nodes)
        inc = read_inc_scales(str(path), "gaudi3", 0, 1)
        for n in (0, 1):
            inc.scales_of(f"model.layers.{n}.self_attn.attn", False)
