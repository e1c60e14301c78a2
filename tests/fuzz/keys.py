# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Names of tensors, and the matcher that reads them."""

from hypothesis import strategies as st

from vllm.fp8_inc.sources.checkpoint import (
    attention_module_of,
    key_in_layer,
    layer_index,
    layer_of,
    match_scale_key,
    producers_of,
)
from vllm.fp8_inc.sources.producers import PRODUCERS

_NAMES = sorted({name for row in PRODUCERS for name in row.tensors})
_WORDS = sorted({word for name in _NAMES for word in name.split(".")}) + [
    *("model", "layers", "self_attn", "attn", "mla_attn", "impl", "mtp", "mtp_block"),
    *("language_model", "vision_tower", "encoder", "h", "blocks", "transformer"),
    *("0", "1", "00", "999999", "1000000", "-1", "٣", "weight", "k_proj", ""),
]


KEYS = st.one_of(
    st.lists(st.sampled_from(_WORDS), max_size=10).map(".".join),
    st.text(max_size=200),
    st.builds(
        "{}.layers.{}.{}.{}".format,
        st.sampled_from(["model", "a.b.vision", "mtp", ".", "x" * 300]),
        st.integers(-1, 10**7),
        st.sampled_from(["self_attn", "attn.impl", "mixer", "self_attn.attn.impl"]),
        st.sampled_from([*_NAMES, "k_proj.weight"]),
    ),
)


def match(keys: list[str]) -> None:
    for key in keys:
        found = match_scale_key(key)
        layer_of(key)
        attention_module_of(key)
        if found is not None:
            assert found.roles is not None and found.use
            assert match_scale_key(key_in_layer(key, found.layer)) is not None
            assert 0 <= layer_index(found.layer) < 10**6
    producers_of(keys, None)
