# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Attention of MLA on CPU over ragged batches, both forms, against torch in float64.

The oracle expands K and V of each request with kv_b_proj, its activations quantised by
ml_dtypes where the layer quantises them. What attends in latent space must give the
same numbers.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import device_numbers
from vllm.fp8_inc.attention import mla_cpu_impl
from vllm.fp8_inc.attention.absorption import break_even
from vllm.fp8_inc.attention.mla_cpu_impl import CPUMLAImpl
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.layers.gemm import fp8_linear
from vllm.fp8_inc.layers.linear import PlainLinearMethod, dequantized_weight
from vllm.fp8_inc.scales import StaticScale

HEADS, NOPE, ROPE, VALUE, LATENT, BLOCK = 3, 32, 16, 48, 64, 16
FEW = break_even(LATENT, NOPE, VALUE)
# Context and new tokens of each request; the first three are decoded.
BATCH = [(37, 1), (0, 1), (160, 1), (64, 5), (0, 20), (48, 130), (112, 16), (16, 2)]
DECODED = 3
LATENT_STATIC, INPUT_SCALE = StaticScale.from_dequant(0.0137, torch.bfloat16), 0.021
ACTIVATIONS = ["plain", "static", "dynamic"]


class Layer(torch.nn.Module):
    """kv_b_proj, plain or FP8, and the halves of its weight as upstream keeps them."""

    def __init__(self, activations: str, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        rows = HEADS * (NOPE + VALUE)
        weight = torch.randn(rows, LATENT) / LATENT**0.5
        self.quant_method, self.device = PlainLinearMethod(), device
        if activations == "plain":
            self.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
            dense = self.weight
        else:
            self.quant_method = None
            codes = device_numbers.encode(weight.numpy() * 32, device)
            self.weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
            self.weight_scale = torch.linspace(0.8, 1.2, rows) / 32
            self.input_quant_scale = None
            if activations == "static":
                self.input_quant_scale = torch.tensor(1 / INPUT_SCALE).to(dtype)
            self.dequantized_weight = lambda out: dequantized_weight(self, out)
            dense = self.dequantized_weight(dtype)
        halves = dense.T.view(LATENT, HEADS, NOPE + VALUE).split([NOPE, VALUE], -1)
        self.W_UK_T, self.W_UV = halves[0].permute(1, 2, 0), halves[1].transpose(0, 1)

    def forward(self, x):
        if self.quant_method:
            return self.quant_method.apply(self, x), None
        scales = self.weight_scale, self.input_quant_scale
        return fp8_linear(x, self.weight, *scales, None, self.device), None

    def oracle(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, nope + value] of [tokens, latent], float64."""
        if self.quant_method:
            out = x.double() @ self.weight.double().T
        else:
            maximum = device_numbers.MAXIMUM[self.device]
            scale = self.input_quant_scale
            if scale is None:
                amax = x.abs().amax(-1, keepdim=True)
                scale = ((amax + 1e-8) / maximum).reciprocal()
            codes = device_numbers.cast(x, device_numbers.to_numpy(scale), self.device)
            values = device_numbers.decode(codes, self.device)
            values = torch.from_numpy(values) / scale.double()
            weight = device_numbers.to_numpy(self.weight)
            weight = torch.from_numpy(device_numbers.decode(weight, self.device))
            out = values @ (weight * self.weight_scale.double()[:, None]).T
        return out.view(-1, HEADS, NOPE + VALUE)


def implementation(layer: Layer, cache: str) -> CPUMLAImpl:
    impl = object.__new__(CPUMLAImpl)
    impl.__dict__ |= {
        "num_heads": HEADS,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "kv_lora_rank": LATENT,
        "scale": 0.15,
        "kv_b_proj": layer,
        "format": FORMATS[layer.device],
        "scales": None,
        "_break_even": FEW,
        "_layer": layer,
    }
    if cache == "fp8":
        impl.scales = SimpleNamespace(k=LATENT_STATIC)
    return impl


def filled(cache: str, device: str, dtype: torch.dtype):
    """All requests in shuffled blocks, their table, and what the blocks stand for."""
    counts = [-(-sum(request) // BLOCK) for request in BATCH]
    shape = (sum(counts) + 2, BLOCK, LATENT + ROPE)
    if cache == "fp8":
        codes = torch.randint(device_numbers.encode(30.0, device).item(), shape)
        codes = (codes + 128 * torch.randint(2, shape)).to(torch.uint8)
        stored = codes.view(torch.float8_e4m3fn)
        values = torch.from_numpy(device_numbers.decode(codes.numpy(), device))
        values = values * LATENT_STATIC.dequant_scale.double()
    else:
        stored = (torch.randn(shape) * 0.3).to(dtype)
        values = stored.double()
    table = torch.zeros(len(BATCH), max(counts), dtype=torch.int32)
    order = torch.randperm(shape[0])
    for row, count in zip(table, counts):
        row[:count], order = order[:count], order[count:]
    return stored, table, values


def metadata(table: torch.Tensor) -> SimpleNamespace:
    lengths = torch.tensor([sum(request) for request in BATCH], dtype=torch.int32)
    new = torch.tensor([0] + [tokens for _, tokens in BATCH[DECODED:]])
    contexts = [context for context, _ in BATCH[DECODED:]]
    decode = SimpleNamespace(block_table=table[:DECODED], seq_lens=lengths[:DECODED])
    prefill = SimpleNamespace(
        query_start_loc=new.cumsum(0),
        chunked_context=SimpleNamespace(context_lens_list=contexts),
        block_table=table[DECODED:],
    )
    return SimpleNamespace(decoded=DECODED, decode=decode, prefill=prefill)


def expected(layer, values, table, q, scale, dtype):
    """Causal attention of each request to expanded K and V, float64."""
    out, start = [], 0
    for number, (blocks, (context, tokens)) in enumerate(zip(table.long(), BATCH)):
        latents = values[blocks].flatten(0, 1)[: context + tokens]
        kv_c, k_pe = latents.split([LATENT, ROPE], -1)
        if number < DECODED and not layer.quant_method:  # absorbed, nothing quantised
            dense = layer.dequantized_weight(dtype).double()
            kv = (kv_c @ dense.T).view(-1, HEADS, NOPE + VALUE)
        else:
            kv = layer.oracle(kv_c.to(dtype))
        k_nope, value = kv.split([NOPE, VALUE], -1)
        key = torch.cat([k_nope, k_pe[:, None].expand(-1, HEADS, -1)], -1)
        query = q[start : start + tokens].double()
        logits = torch.einsum("qhd,khd->hqk", query, key) * scale
        mask = torch.ones(tokens, context + tokens).tril(context).bool()
        weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khv->qhv", weights, value))
        start += tokens
    return out


def run(activations, cache, device, dtype=torch.float32):
    torch.manual_seed(7)
    layer = Layer(activations, device, dtype)
    impl = implementation(layer, cache)
    stored, table, values = filled(cache, device, dtype)
    tokens = sum(new for _, new in BATCH)
    q = torch.randn(tokens, HEADS, NOPE + ROPE).to(dtype)
    output = torch.full((tokens, HEADS * VALUE), torch.nan, dtype=dtype)
    impl.forward_mha(q, None, None, stored, metadata(table), None, output)
    right = expected(layer, values, table, q, impl.scale, dtype)
    found = output.view(tokens, HEADS, VALUE).split([new for _, new in BATCH])
    return [
        ((a.double() - b).norm() / b.norm()).item()
        for a, b in zip(found, right, strict=True)
    ]


@pytest.mark.parametrize("device", FORMATS)
@pytest.mark.parametrize("cache", ["fp8", "plain"])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_every_request_of_a_ragged_batch(activations, cache, device):
    assert max(run(activations, cache, device)) < 1e-5


@pytest.mark.parametrize("cache", ["fp8", "plain"])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_bfloat16_model(activations, cache):
    """Each product, and each result, is rounded to 8 bits."""
    assert max(run(activations, cache, "gaudi3", torch.bfloat16)) < 1e-2


def forms(monkeypatch, change=lambda layer: None):
    """Which requests of the batch attend in which form."""
    layer = Layer("static", "gaudi3", torch.float32)
    change(layer)
    impl = implementation(layer, "fp8")
    stored, table, _ = filled("fp8", "gaudi3", torch.float32)
    seen = {"_absorbed": [], "_expanded": []}
    for name, found in seen.items():

        def note(q, cache, table, context, found=found):
            found.append((context, len(q)))
            return torch.zeros(len(q), HEADS, VALUE)

        monkeypatch.setattr(impl, name, note)
    tokens = sum(new for _, new in BATCH)
    q = torch.randn(tokens, HEADS, NOPE + ROPE)
    output = torch.empty(tokens, HEADS * VALUE)
    impl.forward_mha(q, None, None, stored, metadata(table), None, output)
    return seen["_absorbed"], seen["_expanded"]


def test_a_few_tokens_over_a_context_attend_in_latent_space(monkeypatch):
    absorbed, expanded = forms(monkeypatch)
    assert absorbed == [(64, 5), (112, 16), (16, 2)]
    assert expanded == [(0, 20), (48, 130)]


def test_a_weight_that_is_not_the_absorbed_one_is_expanded(monkeypatch):
    """INC quantises kv_b_proj after W_UK and W_UV were taken."""
    absorbed, expanded = forms(
        monkeypatch, lambda layer: delattr(layer, "dequantized_weight")
    )
    assert not absorbed and len(expanded) == len(BATCH) - DECODED


def test_break_even_of_deepseek():
    """At 171 new tokens both forms take as many multiply-adds, whatever the rope is."""
    latent, nope, rope, value = 512, 128, 64, 128
    tokens = break_even(latent, nope, value)
    expand = latent * (nope + value) + tokens * (nope + rope + value)
    assert np.isclose(expand, tokens * (2 * latent + rope))
    assert 170 < tokens < 171
    assert break_even(64, 64, 64) == np.inf


@pytest.mark.parametrize("activations", ["static", "dynamic"])
def test_the_bound_catches_activations_that_are_not_quantised(activations, monkeypatch):
    monkeypatch.setattr(mla_cpu_impl, "as_seen", lambda layer, kv_c, fmt: kv_c)
    errors = run(activations, "fp8", "gaudi2")
    assert [error > 1e-2 for error in errors] == [n in (3, 6, 7) for n in range(8)]
