# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The SDPA operators in software, against torch and against numpy with ml_dtypes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import device_numbers
from tests.device_numbers import to_numpy

FP8 = torch.float8_e4m3fn
HEADS, QUERIES, KEYS, DIM = 3, 7, 12, 32
SCALE = 0.21


def qkv(queries=QUERIES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, HEADS, n, DIM) for n in (queries, KEYS, KEYS)]
    return [torch.randn(shape, generator=generator) * 2 for shape in shapes]


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def fp8_sdpa(*args, **kwargs):
    return torch.ops.hpu.fp8_sdpa_recomp_fwd(*args, **kwargs)


def exact(q, k, v, mask=None):
    """float64 logits, masked."""
    logits = to_numpy(q).astype("f8") @ to_numpy(k).astype("f8").swapaxes(-1, -2)
    logits = logits * SCALE
    return logits if mask is None else np.where(mask.numpy(), logits, -np.inf)


@pytest.mark.parametrize("masked", ["causal", "bool", "added", "valid", "left"])
def test_every_mask_against_torch(masked):
    q, k, v = qkv()
    mask = causal(QUERIES, KEYS)
    given, valid, padding = None, None, "right"
    if masked in ("bool", "added"):
        given = mask if masked == "bool" else torch.zeros(mask.shape)
        given = given if masked == "bool" else given.masked_fill(~mask, -torch.inf)
    if masked in ("valid", "left"):
        valid = torch.tensor([5, 12])
        ids = torch.arange(KEYS)
        padding = "right" if masked == "valid" else "left"
        seen = (
            ids < valid[:, None] if masked == "valid" else ids >= KEYS - valid[:, None]
        )
        mask = seen[:, None, None].expand(-1, -1, QUERIES, -1)
    out, maximum, inverse, _ = torch.ops.hpu.sdpa_recomp_fwd(
        q, k, v, given, 0.0, SCALE, masked == "causal", False, "fp32", valid, padding
    )
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    logits = exact(q, k, v, mask)
    np.testing.assert_allclose(maximum.numpy(), logits.max(-1, keepdims=True), 1e-5)
    total = np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)
    np.testing.assert_allclose(1 / inverse.numpy(), total, 1e-5)


@pytest.mark.parametrize("prob_quant", [1.0, 128.0])
def test_fp8_quantises_the_probabilities(device, prob_quant):
    q, k, v = qkv()
    scales = [0.031, 0.052, 0.017]
    codes = [
        torch.ops.hpu.cast_to_fp8_v2(x, 1 / s, False, False, FP8)[0]
        for x, s in zip((q, k, v), scales)
    ]
    q_scale_s = torch.tensor(prob_quant)
    out, maximum, _, _, amax_s, amax_o = fp8_sdpa(
        *codes, None, 0.0, SCALE, True, False, "fast", *map(torch.tensor, scales),
        q_scale_s, None, 1 / q_scale_s, True, True, None, "right",
    )  # fmt: skip
    wide = [
        device_numbers.decode(to_numpy(c), device) * np.float32(s)
        for c, s in zip(codes, scales)
    ]
    logits = wide[0] @ wide[1].swapaxes(-1, -2) * SCALE
    logits = np.where(causal(QUERIES, KEYS).numpy(), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    coded = device_numbers.decode(device_numbers.encode(p * prob_quant, device), device)
    expected = coded / prob_quant @ wide[2] / p.sum(-1, keepdims=True)
    assert out.dtype == torch.bfloat16 and maximum.dtype == torch.bfloat16
    # Ties of P are rare; the median says that the rounding is right, and the last
    # bit of bfloat16 is all that is left.
    error = np.abs(out.float().numpy() - expected)
    assert np.median(error) < 2**-8 * np.abs(expected).mean()
    assert amax_s.item() == 1.0
    np.testing.assert_allclose(amax_o.item(), np.abs(expected).max(), rtol=0.02)
    if prob_quant == 1.0:
        assert ((p > 0) & (coded == 0)).any()  # small ones are flushed


@pytest.mark.parametrize("is_causal", [True, False])
def test_unquantised_operands_stay_so(device, is_causal):
    """INC measures through the FP8 operator, and asks for the amax of P."""
    q, k, v = (x.bfloat16() for x in qkv())
    none = [None] * 6
    out, *_, amax_s, _ = fp8_sdpa(
        q, k, v, None, 0.0, SCALE, is_causal, False, "fast", *none, True, False,
        None, "right",
    )  # fmt: skip
    mask = causal(QUERIES, KEYS) if is_causal else None
    expected = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask, scale=SCALE
    )
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
    assert amax_s.item() == 1.0


def test_window_and_sinks(device):
    q, k, v = qkv(KEYS)
    codes = [
        torch.ops.hpu.cast_to_fp8_v2(x, None, False, False, FP8)[0] for x in (q, k, v)
    ]
    sinks = torch.tensor([0.3, -1.0, 2.0])
    q_scale_s = torch.tensor(128.0)
    arguments = [
        *codes, None, 0.0, SCALE, True, False, "fast", None, None, None, q_scale_s,
        None, 1 / q_scale_s, False, False, None, "right",
    ]  # fmt: skip
    out = fp8_sdpa(*arguments, (3, 0), sinks)[0]
    wide = [torch.from_numpy(device_numbers.decode(to_numpy(c), device)) for c in codes]
    ids = torch.arange(KEYS)
    mask = (ids <= ids[:, None]) & (ids >= ids[:, None] - 3)
    logits = (wide[0] @ wide[1].mT * SCALE).masked_fill(~mask, -torch.inf)
    sink = sinks.double().view(1, -1, 1, 1).expand(2, -1, KEYS, 1)
    weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    expected = weights @ wide[2]
    error = (out.double() - expected).abs()
    assert error.median() < 0.02 * expected.abs().mean()
    other = fp8_sdpa(*arguments, (-1, -1), None)[0]
    assert (other.double() - expected).abs().median() > 0.1 * expected.abs().mean()
    assert torch.equal(fp8_sdpa(*arguments)[0], other)  # the older arity


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = qkv()
    mask = torch.full((QUERIES, KEYS), -torch.inf)
    out = torch.ops.hpu.sdpa_recomp_fwd(
        q, k, v, mask, 0.0, SCALE, False, False, "fast", None, "right"
    )[0]
    assert not out.any()


def test_dropout_is_refused():
    with pytest.raises(NotImplementedError, match="dropout"):
        torch.ops.hpu.sdpa_recomp_fwd(
            *qkv(), None, 0.5, SCALE, False, False, "fast", None, "right"
        )
