# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Run by pytest in a process of its own: tests/hpu/test_software_gaudi.py."""

import os

import habana_frameworks.torch as htorch
import pytest
import torch
from habana_frameworks.torch.hpex import kernels
from habana_frameworks.torch.utils import experimental
from soft_gaudi.compiling import compiled
from soft_gaudi.graphs import recorded

from vllm.fp8_inc.hpu_device import hpu_format

CHIP = os.environ["SOFT_GAUDI"]
TENSORS = os.environ["SOFT_GAUDI_TENSORS"]
only_hpu = pytest.mark.skipif(
    TENSORS != "hpu", reason="on cpu nothing tells them apart"
)
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="hpu"),
        lambda: torch.empty_like(torch.ones(3), device="hpu:0"),
        lambda: torch.arange(3, device=torch.device("hpu")),
        lambda: torch.tensor([1.0, 2.0], device="hpu"),
        lambda: torch.as_tensor([1, 2], device="hpu"),
        lambda: torch.ones(3).to("hpu", non_blocking=True),
        lambda: torch.ones(3).hpu(),
        lambda: torch.nn.Linear(2, 2).to("hpu").weight,
        lambda: torch.nn.Linear(2, 2, device="hpu").weight,
    ],
)
def test_what_tensors_for_hpu_say(make):
    assert make().device.type == TENSORS


def test_the_default_device_may_be_hpu():
    with torch.device("hpu"):
        assert torch.nn.Linear(2, 2).weight.device.type == TENSORS


@only_hpu
@pytest.mark.parametrize(
    "mix",
    [
        lambda hpu, cpu: hpu + cpu,
        lambda hpu, cpu: torch.matmul(cpu, hpu),
        lambda hpu, cpu: torch.cat((hpu, cpu)),
        lambda hpu, cpu: cpu.add_(hpu),
        lambda hpu, cpu: hpu.index_select(0, cpu.long()[0]),
        lambda hpu, cpu: torch.nn.functional.linear(hpu, cpu),
        lambda hpu, cpu: torch.where(hpu > 0, hpu, cpu),
    ],
)
def test_operands_on_both_devices_are_an_error(mix):
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(2, 2, device="hpu"), torch.ones(2, 2))


@only_hpu
def test_a_tensor_on_hpu_is_not_a_numpy_array():
    with pytest.raises(TypeError, match="hpu:0"):
        torch.ones(2, device="hpu").numpy()


def test_numbers_copies_and_indices_may_come_from_the_host():
    x = torch.arange(4.0, device="hpu") * torch.tensor(2.0)
    x[1:3].copy_(torch.tensor([7.0, 8.0]))
    x[torch.tensor([0, 3])] = torch.tensor(5.0, device="hpu")
    assert x.to("cpu", non_blocking=True).tolist() == [5, 7, 8, 5] == x.tolist()


def test_views_share_memory_and_results_resize():
    x = torch.zeros(2, 3, device="hpu")
    x.t()[1].view(2).add_(1)
    x.view(torch.uint8).unfold(1, 4, 4)[0, 2].fill_(0)
    x.as_strided((2,), (3,), 2).add_(torch.tensor([2.0, 3.0], device="hpu"))
    assert x.tolist() == [[0, 1, 2], [0, 1, 3]]
    out = torch.empty(0, device="hpu")
    torch.add(x, x, out=out)
    assert out.device.type == TENSORS and out.tolist() == [[0, 2, 4], [0, 2, 6]]


@only_hpu
def test_memory_is_counted_until_it_is_free():
    before = torch.hpu.memory_allocated()
    x = torch.zeros(1000, device="hpu")
    y = x + 1
    view = y[10:]
    del y
    assert torch.hpu.memory_allocated() == before + 8000
    free, total = torch.hpu.mem_get_info()
    assert total - free == torch.hpu.memory_allocated()
    del x, view
    assert torch.hpu.memory_allocated() == before
    assert torch.hpu.max_memory_allocated() >= before + 8000
    torch.hpu.reset_peak_memory_stats()
    assert torch.hpu.max_memory_allocated() == before


def test_the_worker_and_our_pieces_see_the_same_chip():
    kind = experimental._get_device_type()
    assert kind.name.lower() == f"syndevice{CHIP}"
    assert hpu_format().name == CHIP


def test_casts_have_the_range_of_the_chip():
    codes, _ = torch.ops.hpu.cast_to_fp8_v2(
        torch.tensor([1000.0], device="hpu"), None, False, False, FP8
    )
    assert codes.float().item() == {"gaudi2": 240.0, "gaudi3": 448.0}[CHIP]


def test_a_cache_of_fp8_is_written_and_a_padded_slot_is_the_last_row():
    cache = torch.zeros(4, 2, dtype=FP8, device="hpu")
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="hpu").to(FP8)
    cache.index_copy_(0, torch.tensor([1, -1], device="hpu"), rows)
    assert cache.float().tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    picked = cache.index_select(0, torch.tensor([-1, 1], device="hpu"))
    assert picked.float().tolist() == [[3, 4], [1, 2]]


def test_stale_token_ids_of_padding_are_embedded():
    table = torch.tensor([[1.0], [2.0]])
    found = torch.nn.functional.embedding(torch.tensor([-1, 1, 7]), table)
    assert found.flatten().tolist() == [1, 2, 2]


def test_a_padded_group_is_a_row_of_zeros():
    rows = torch.nn.functional.one_hot(torch.tensor([1, -1]), num_classes=2)
    assert rows.tolist() == [[0, 1], [0, 0]]


def test_the_backend_of_torch_compile_runs_the_graph():
    before = len(compiled)

    @torch.compile(backend="hpu_backend")
    def double(x):
        return x + x * torch.ones(3, device="hpu")

    assert double(torch.ones(3, device="hpu")).tolist() == [2, 2, 2]
    assert len(compiled) == before + 1


def test_graphs_are_counted_by_the_shape_of_their_inputs():
    before = recorded.copy()
    module = htorch.hpu.wrap_in_hpu_graph(torch.nn.Linear(2, 2))
    for rows in (1, 3, 3):
        module(torch.ones(rows, 2))
    assert sorted((recorded - before).values()) == [1, 2]


def test_fused_attention_is_attention_with_grouped_heads():
    q, k, v = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    valid = torch.tensor([5])
    ours = kernels.FusedSDPA.apply(
        q, k, v, None, 0.0, True, None, "fast", True, valid, "right"
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(ours, expected)


def test_the_fp8_attention_tells_the_amax_of_p_second():
    """As INC reads it."""
    q, k, v = (torch.randn(1, heads, 5, 8).bfloat16() for heads in (4, 2, 2))
    out, amax, _ = kernels.fp8_fused_sdpa(q, k, v, is_causal=True, is_amax_s=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    assert amax.item() == 1.0


def test_both_rotations():
    x, angle = torch.randn(3, 4), torch.rand(3, 2)
    turned = torch.view_as_complex(x.view(3, 2, 2).contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    pairs = angle.repeat_interleave(2, -1)
    ours = kernels.apply_rotary_pos_emb(
        x, pairs.cos(), pairs.sin(), mode=kernels.RotaryPosEmbeddingMode.PAIRWISE
    )
    torch.testing.assert_close(ours, torch.view_as_real(turned).flatten(1))
    blocks = torch.cat((angle, angle), -1)
    swapped = x[:, [0, 2, 1, 3]]
    ours = kernels.apply_rotary_pos_emb(swapped, blocks.cos(), blocks.sin())
    torch.testing.assert_close(
        ours[:, [0, 2, 1, 3]], torch.view_as_real(turned).flatten(1)
    )
