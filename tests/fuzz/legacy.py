# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The legacy JSON of scales."""

import tempfile
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.nearly_right import NUMBERS, a_file, an_object, maybe
from vllm.fp8_inc.formats import GAUDI2
from vllm.fp8_inc.sources.legacy_json import read_legacy_scales

_RANKS = st.sampled_from(["0", "1", "2", "00", "-1", "x"])
LEGACY = a_file(
    maybe(
        an_object(
            {
                "model_type": maybe(st.just("llama")),
                "kv_cache": maybe(
                    an_object(
                        {
                            "dtype": maybe(st.just("float8_e4m3fn")),
                            "scaling_factor": maybe(
                                st.dictionaries(
                                    _RANKS,
                                    maybe(
                                        st.dictionaries(
                                            _RANKS, maybe(NUMBERS), max_size=3
                                        )
                                    ),
                                    max_size=3,
                                )
                            ),
                        }
                    )
                ),
            }
        )
    )
)


def read_legacy(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.json"
        path.write_bytes(data)
        found = read_legacy_scales(str(path), "llama", 0, 1, GAUDI2, {}).found
    for roles in found.values():
        assert all(0 < scale.dequant_scale <= 1e30 for scale in roles.values())
