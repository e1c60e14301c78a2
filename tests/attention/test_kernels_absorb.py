# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The products of MLA with kv_b_proj's halves against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.fp8_inc.attention.kernels import absorb

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@st.composite
def shapes(draw):
    return {
        "tokens": draw(st.integers(1, 70)),
        "heads": draw(st.integers(1, 5)),
        "nope": draw(st.integers(1, 100)),
        "value": draw(st.integers(1, 100)),
        "latent": 16 * draw(st.integers(1, 9)),
        "weight": draw(st.sampled_from(DTYPES)),
        "sliced": draw(st.booleans()),
        "threads": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 2**31)),
    }


def halves(heads, nope, value, latent, dtype, sliced, generator):
    """W_UK [heads, nope, latent] and W_UV [heads, latent, value] of one weight."""
    rows = heads * (nope + value)
    weight = torch.randn(rows, latent, generator=generator).to(dtype)
    parts = weight.T.view(latent, heads, nope + value).split([nope, value], -1)
    w_uk, w_uv = parts[0].permute(1, 2, 0), parts[1].transpose(0, 1)
    return (w_uk, w_uv) if sliced else (w_uk.contiguous(), w_uv.contiguous())


def error(found, form, x, weight):
    """The largest difference, relative to the sum of the products' magnitudes."""
    x, weight = x.double(), weight.double()
    exact = torch.einsum(form, x, weight)
    return ((found - exact).abs() / torch.einsum(form, x.abs(), weight.abs())).max()


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_any_shape(shape):
    generator = torch.Generator().manual_seed(shape["seed"])
    sizes = [shape[name] for name in ("heads", "nope", "value", "latent")]
    w_uk, w_uv = halves(*sizes, shape["weight"], shape["sliced"], generator)
    heads, nope, _, latent = sizes
    wide = torch.randn(shape["tokens"], heads, nope + latent, generator=generator)
    query, attended = wide.split([nope, latent], -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(absorb, "threads_for", lambda operations: shape["threads"])
        absorbed = absorb.to_latent(query, w_uk)
        expanded = absorb.from_latent(attended, w_uv)
    assert error(absorbed, "thn,hnl->thl", query, w_uk) < 1e-6
    assert error(expanded, "thl,hlv->thv", attended, w_uv) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_only_the_result_is_rounded(tokens, dtype):
    generator = torch.Generator().manual_seed(1)
    w_uk, w_uv = halves(4, 128, 128, 512, dtype, True, generator)
    query = torch.randn(tokens, 4, 128, generator=generator).to(dtype)
    attended = torch.randn(tokens, 4, 512, generator=generator).to(dtype)
    for found, exact in (
        (
            absorb.to_latent(query, w_uk),
            torch.einsum("thn,hnl->thl", query.double(), w_uk.double()),
        ),
        (
            absorb.from_latent(attended, w_uv),
            torch.einsum("thl,hlv->thv", attended.double(), w_uv.double()),
        ),
    ):
        assert found.dtype == dtype
        # Half a unit in the last place, and what float32 sums add.
        bound = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * exact.abs().max()
        assert ((found.double() - exact).abs() <= bound).all()


def test_a_spoiled_token_spoils_no_other():
    generator = torch.Generator().manual_seed(2)
    w_uk, w_uv = halves(2, 32, 48, 64, torch.bfloat16, True, generator)
    for product, weight, size in (
        (absorb.to_latent, w_uk, 32),
        (absorb.from_latent, w_uv, 64),
    ):
        x = torch.randn(6, 2, size, generator=generator)
        expected = product(x, weight)
        x[3] = torch.nan
        found = product(x, weight)
        assert found[3].isnan().all()
        kept = [0, 1, 2, 4, 5]
        assert torch.equal(found[kept], expected[kept])


def test_no_tokens():
    weight = torch.ones(2, 16, 32)
    assert absorb.to_latent(torch.ones(0, 2, 16), weight).shape == (0, 2, 32)
