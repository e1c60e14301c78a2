# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A query is not touched by what stands behind it, be it NaN."""

import pytest
import torch

from vllm.fp8_inc.attention import dense
from vllm.fp8_inc.attention.dense import Joined, causal_attention


def joined_attention(query, key, values, scale):
    """The same of a context in two parts, as MLA's prefill takes it."""
    context = len(key) - len(query)
    attention = Joined(query, scale, values.shape[-1])
    for part in (range(context // 2), range(context // 2, context)):
        if part:
            attention.attend(key[part], values[part], causal=False)
    attention.attend(key[context:], values[context:], causal=True)
    return attention.result()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("queries", [40, 25, 1])
@pytest.mark.parametrize("value_dim", [16, 8])
@pytest.mark.parametrize("attend", [causal_attention, joined_attention])
def test_earlier_queries_are_as_without_it(
    monkeypatch, value, which, queries, value_dim, attend
):
    monkeypatch.setattr(dense, "_TILE", 16)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(queries, 2, 16, generator=generator)
    key = torch.randn(40, 2, 16, generator=generator)
    values = torch.randn(40, 2, value_dim, generator=generator)
    clean = attend(query, key, values, 0.25)
    torch.testing.assert_close(clean, causal_attention(query, key, values, 0.25))
    assert clean.isfinite().all()
    for at in (39, 30, 16, 15, 3, 0):
        spoiled = {"key": key.clone(), "value": values.clone()}
        spoiled[which][at, 1, 5] = value
        found = attend(query, spoiled["key"], spoiled["value"], 0.25)
        before = max(at - (40 - queries), 0)
        torch.testing.assert_close(found[:before], clean[:before])


def test_a_sum_that_overflows_is_no_nan():
    big = torch.full((8, 1, 16), 3e38)
    small = torch.ones(8, 1, 16)
    out = causal_attention(small * 1e-38, big, small, 0.25)
    torch.testing.assert_close(out, small)
