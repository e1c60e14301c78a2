# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""JSON that is nearly right: built like a real one, then spoiled.

Most of it passes the first checks.
"""

import json
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, 1, -1, 8, 240, 448, 1e-40, 1e30, 1e31, 10**400]),
)
_SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20))


def deep(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


ANYTHING = st.one_of(
    st.recursive(
        _SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.text(max_size=8), inner, max_size=4),
        ),
        max_leaves=8,
    ),
    st.builds(deep, _SCALARS, st.integers(1, 700)),
)


def maybe(usual: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly ``usual``, at times anything."""
    return st.one_of(usual, usual, usual, ANYTHING)


def an_object(optional: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    """An object with some of these keys, and now and then one of no meaning."""
    known = st.fixed_dictionaries({}, optional=optional)
    extra = st.dictionaries(st.text(max_size=8), ANYTHING, max_size=1)
    return st.builds(lambda a, b: {**b, **a}, known, extra)


def _spoiled(text: str, cut: float, at: float, byte: int) -> bytes:
    """At times cut short, or with another byte somewhere."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data and byte < 256:
        data[int(at * (len(data) - 1))] = byte
    return bytes(data[: int(len(data) * cut)])


def a_file(content: st.SearchStrategy) -> st.SearchStrategy:
    """Bytes of a JSON; three of four as they should be."""
    cut = st.one_of(st.just(1.0), st.just(1.0), st.just(1.0), st.floats(0, 1))
    byte = st.one_of(st.just(256), st.just(256), st.just(256), st.integers(0, 255))
    return st.builds(_spoiled, content.map(json.dumps), cut, st.floats(0, 1), byte)
