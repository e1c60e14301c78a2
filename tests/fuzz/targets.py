# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What is fuzzed: each target takes what hypothesis draws, and may raise ValueError."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import checkpoint, inc, keys, legacy, scheme


@dataclass(frozen=True)
class Target:
    """Something to fuzz.

    Attributes:
        inputs: What hypothesis draws.
        run: Takes it; may raise ValueError only.
    """

    inputs: st.SearchStrategy
    run: Callable[[Any], None]


TARGETS = {
    "names": Target(st.lists(keys.KEYS, max_size=4), keys.match),
    "scheme": Target(scheme.QUANTIZATION, scheme.declared),
    "legacy": Target(legacy.LEGACY, legacy.read_legacy),
    "inc": Target(st.tuples(inc.QUANT_CONFIG, inc.NODES, st.booleans()), inc.read_inc),
    "checkpoint": Target(
        st.tuples(
            checkpoint.shards(),
            checkpoint.CONFIG,
            st.one_of(st.none(), checkpoint.INDEX),
        ),
        checkpoint.inspect,
    ),
}
