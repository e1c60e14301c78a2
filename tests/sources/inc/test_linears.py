# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Linear layers and experts: their scales, the lists, and which rank has which."""

import pytest

from tests.sources.inc.helpers import SAMPLES, cached, measured, read, write_file
from vllm.fp8_inc.sources.inc.linears import LinearScales

MOE = "model.layers.3.mlp.experts.moe_op"


def sample(tmp_path, folder, prefix, device, size, num_experts, **keys):
    path = f"{SAMPLES}/{folder}/{prefix}"
    return read(tmp_path, device, 0, size, num_experts, dump_stats_path=path, **keys)


def test_linear_layers(tmp_path):
    nodes = {
        "model.layers.0.self_attn.qkv_proj": measured(9.75, weight=0.25),
        "model.layers.0.mlp.down_proj": measured(
            900.0, outputs=[1.0, 2.0], weight=57.0
        ),
        "model.layers.0.mlp.gate": measured(3.0, weight=1.0),
        "model.layers.0.mlp.in_proj_of_mine": measured(3.0, weight=1.0),
        "model.layers.0.self_attn.attn.impl.block2batch_matmul": measured(1.0, 2.0),
        "lm_head": measured(3.0, weight=1.0),
    }
    write_file(tmp_path, nodes)
    names = ["lm_head", "mlp\\.gate\\b"]
    found = read(tmp_path, blocklist={"names": names, "types": ["QKVParallelLinear"]})
    assert found.linears == {
        "model.layers.0.mlp.down_proj": LinearScales(16.0, 0.5),
        "model.layers.0.mlp.in_proj_of_mine": LinearScales(2.0**-5, 2.0**-7),
    }
    found = read(tmp_path, scale_method="ACT_MAXABS_HW_WEIGHTS_PCS_MAXABS_POW2")
    assert found.linears["lm_head"] == LinearScales(2.0**-5, None)
    assert len(found.linears) == 5


def test_projections_of_mla_are_found_where_the_worker_holds_them(tmp_path):
    """Its wrapper has them, and its implementation kv_b_proj."""
    at = "model.layers.3.self_attn.mla_attn"
    known = {
        "q_a_proj": f"{at}.q_a_proj",
        "o_proj": f"{at}.o_proj",
        "kv_b_proj": f"{at}.mla_attn.impl.kv_b_proj",
    }
    nodes = {path: measured(1.5, weight=0.25) for path in known.values()}
    write_file(tmp_path, nodes)
    found = read(tmp_path)
    for name, path in known.items():
        wanted = f"model.layers.3.self_attn.{name}"
        assert found.path_of(wanted, found.linears) == path
    other = "model.layers.4.self_attn.o_proj"
    assert found.path_of(other, found.linears) == other


def test_a_weight_scale_per_channel_belongs_to_its_rank(tmp_path):
    node = cached(0.5, weight={"0": [0.25, 0.125], "1": [1.0, 1.0, 1.0]})
    for rank in (0, 1):
        write_file(tmp_path, {"lm_head": node}, f"_MAXABS_HW_{rank}_2", "Scale")
    own = read(tmp_path, size=2)
    assert own.linears["lm_head"] == LinearScales(0.5, (0.25, 0.125))
    assert read(tmp_path).linears["lm_head"] == LinearScales(0.5, None)


def test_a_linear_layer_that_was_never_visited(tmp_path, caplog_vllm):
    write_file(tmp_path, {"lm_head": measured(0.0, weight=1.0)})
    assert not read(tmp_path).linears
    (text,) = [r.getMessage() for r in caplog_vllm.records]
    assert "1 linear layers were never visited" in text and "lm_head" in text


def moe(first, count, amax=1.0, weight=0.5):
    """A rank's experts; the e-th has 2^e times the amax of the 0-th."""
    inner = [amax * 2.0 ** (first + e) for e in range(count)]
    nodes = {MOE: measured(7.0 * amax, outputs=[1.0, *inner])}
    for e in range(count):
        at = weight * 2.0 ** (first + e)
        nodes[f"{MOE}.w13_list.{e}"] = measured(0.0, weight=at)
        nodes[f"{MOE}.w2_list.{e}"] = measured(0.0, weight=2 * at)
    return nodes


def check(experts, indices, factor=1.0):
    assert sorted(experts.intermediate) == indices
    for e in indices:
        assert experts.intermediate[e] == factor * 2.0 ** (e - 6)
        assert experts.w13[e] == factor * 2.0 ** (e - 8)
        assert experts.w2[e] == factor * 2.0 ** (e - 7)


def test_under_expert_parallelism_a_rank_counts_its_own_from_zero(tmp_path):
    for rank in (0, 1):
        write_file(tmp_path, moe(4 * rank, 4, 1.0 + rank / 16), f"_{rank}_2")
    whole = read(tmp_path, size=1, num_experts=8).experts[MOE]
    assert sorted(whole.intermediate) == list(range(8))
    assert whole.intermediate[6] == 2.0**0 and whole.w13[5] == 2.0**-3
    assert whole.input_dequant_scale == 0.125
    own = read(tmp_path, size=2, rank=1, num_experts=8).experts[MOE]
    check(own, [4, 5, 6, 7])


def test_under_tensor_parallelism_every_rank_has_a_slice_of_each(tmp_path):
    write_file(tmp_path, moe(0, 4, 1.0, 0.5), "_0_2")
    write_file(tmp_path, moe(0, 4, 4.0, 2.0), "_1_2")
    check(read(tmp_path, size=1, num_experts=4).experts[MOE], [0, 1, 2, 3], 4.0)
    check(read(tmp_path, size=2, num_experts=4).experts[MOE], [0, 1, 2, 3], 1.0)


def test_a_wrong_number_of_experts(tmp_path):
    for rank in (0, 1):
        write_file(tmp_path, moe(0, 4), f"_{rank}_2")
    with pytest.raises(ValueError, match="4 experts on each of 2 ranks, but the model"):
        read(tmp_path, size=2, num_experts=16)


def test_experts_of_many_ranks_need_the_models_number(tmp_path, caplog_vllm):
    for rank in (0, 1):
        write_file(tmp_path, moe(0, 4), f"_{rank}_2")
    assert not read(tmp_path, size=2).experts
    assert "experts are left out" in caplog_vllm.text
    write_file(tmp_path, moe(0, 4), "_0_1")
    check(read(tmp_path).experts[MOE], [0, 1, 2, 3])


def test_experts_that_nobody_visited_are_named(tmp_path, caplog_vllm):
    nodes = moe(0, 4)
    nodes[MOE]["outputs"][2] = [[0.0]]
    del nodes[f"{MOE}.w2_list.3"]
    write_file(tmp_path, nodes)
    experts = read(tmp_path, num_experts=4).experts[MOE]
    assert experts.intermediate[1] == 0 and 3 not in experts.w2
    (text,) = [r.getMessage() for r in caplog_vllm.records]
    assert "2 experts have no scales" in text
    assert f"{MOE}: 1, {MOE}: 3" in text


def test_blocked_experts_stay_as_they_are(tmp_path):
    write_file(tmp_path, moe(0, 4))
    assert not read(tmp_path, blocklist={"names": ["moe_op"]}).experts
    types = ["VllmMixtureOfExpertsOp", "MoeMatmul"]
    assert not read(tmp_path, blocklist={"types": types}).experts


@pytest.mark.parametrize(
    "folder, prefix, device, size, num_experts, local, layers",
    [
        ("mla_fork2025_dsr1_g3", "inc_output", "gaudi3", 8, 256, 32, 1),
        (
            "mla_fork2025_dsr1_g2_unprocessed",
            "inc_measure_output",
            "gaudi2",
            16,
            256,
            16,
            1,
        ),
        ("moe_fork2025_qwen3_g2", "inc_measure_output", "gaudi2", 4, 128, 32, 2),
        ("moe_gaudi2026_llama4_g3", "inc_output", "gaudi3", 8, 128, 16, 1),
    ],
)
def test_the_samples_of_rank_0(
    tmp_path, folder, prefix, device, size, num_experts, local, layers
):
    found = sample(tmp_path, folder, prefix, device, size, num_experts)
    assert len(found.experts) == layers
    for experts in found.experts.values():
        assert sorted(experts.intermediate) == list(range(local))
        assert experts.input_dequant_scale > 0
        assert list(experts.w13) == list(experts.w2) == [0, 1]  # the sample's trim
