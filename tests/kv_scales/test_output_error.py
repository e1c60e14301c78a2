# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""`mse` weighs the output of attention, not the tensor."""

from types import SimpleNamespace

import pytest
import torch

from vllm.fp8_inc.calibration.output_error import RATIOS, output_errors
from vllm.fp8_inc.formats import GAUDI2, GAUDI3


def gqa(tokens: int = 24) -> tuple[SimpleNamespace, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 16, generator=generator)

    layer = SimpleNamespace(impl=SimpleNamespace(scale=0.25))
    return layer, {"q": normal(4), "k": normal(2), "v": normal(2)}


def amax_of(kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {role: x.abs().amax((0, 2)) for role, x in kept.items()}


def attention(q, k, v, scale):
    """Causal attention, written out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    future = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum(
        "hqk,khd->qhd", logits.masked_fill(future, -1e30).softmax(-1), v
    )


@pytest.mark.parametrize("fmt", [GAUDI2, GAUDI3])
def test_errors_are_those_of_the_definition(fmt):
    layer, kept = gqa()
    errors, square = output_errors(layer, kept, amax_of(kept), fmt)
    exact = attention(**kept, scale=0.25)
    assert square == pytest.approx(exact.square().sum().item(), rel=1e-5)
    for role, heads in (("k", 2), ("v", 2), ("q", 4)):
        for n in (0, 3, len(RATIOS) - 1):
            scale = kept[role].abs().amax((0, 2), keepdim=True) * RATIOS[n] / fmt.max
            codes = (kept[role] / scale).clamp(-fmt.max, fmt.max)
            rounded = codes.to(torch.float8_e4m3fn).float() * scale
            out = attention(**(kept | {role: rounded}), scale=0.25)
            error = (out - exact).square().sum((0, 2)).view(heads, -1).sum(1)
            torch.testing.assert_close(
                errors[role][:, n].float(), error, rtol=2e-2, atol=1e-6
            )


def test_an_outlier_that_nobody_looks_at_is_cut_off():
    """A value far off in a token whose key repels every query; the rest is tiny."""
    layer, kept = gqa()
    kept["q"] = kept["q"].abs()
    kept["k"][5, 1] = -60.0  # its P is 0, for the two query heads of this KV head
    kept["v"] *= 2.0**-13
    kept["v"][5, 1, 3] = 4.0
    # Later tokens only, so that token 5 itself has others to look at.
    errors = output_errors(layer, kept, amax_of(kept), GAUDI3)[0]["v"]
    chosen = errors[1, :].argmin().item()
    assert RATIOS[chosen] < 0.25
    tensor = kept["v"][:, 1]

    def tensor_error(ratio: float) -> float:
        scale = 4.0 * ratio / 448
        codes = (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes.float() * scale - tensor).square().sum().item()

    assert min(RATIOS, key=tensor_error) == 1.0


def test_the_latent_s_error_is_that_of_the_projected_output():
    generator = torch.Generator().manual_seed(2)
    latent, rope, heads, v = 8, 4, 3, 5
    kept = {
        "q": torch.randn(10, heads, 6, generator=generator),
        "q_latent": torch.randn(10, heads, latent + rope, generator=generator),
        "kv_c": torch.randn(10, 1, latent, generator=generator),
        "k_pe": 9 * torch.randn(10, 1, rope, generator=generator),
    }
    w_uv = torch.randn(heads, latent, v, generator=generator)
    layer = SimpleNamespace(
        impl=SimpleNamespace(scale=0.3), kv_lora_rank=latent, W_UV=w_uv
    )
    errors, _ = output_errors(layer, kept, amax_of(kept), GAUDI2)
    assert set(errors) == {"latent", "q"}

    def project(row: torch.Tensor) -> torch.Tensor:
        keys = row.expand(-1, heads, -1)
        out = attention(kept["q_latent"], keys, keys[..., :latent], 0.3)
        return torch.einsum("qhl,hlv->qhv", out, w_uv)

    row = torch.cat([kept["kv_c"], kept["k_pe"]], -1)
    scale = row.abs().max() / 240
    rounded = (row / scale).clamp(-240, 240).to(torch.float8_e4m3fn).float() * scale
    error = (project(rounded) - project(row)).square().sum().view(1)
    torch.testing.assert_close(errors["latent"][:, 0].float(), error, rtol=2e-2, atol=0)
