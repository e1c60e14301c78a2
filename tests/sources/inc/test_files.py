# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The files that INC would read are found, as JSON, for the rank that serves."""

import json
import shutil

import pytest

from tests.sources.inc import inc_oracle
from tests.sources.inc.helpers import (
    SAMPLES,
    cached,
    measured,
    mha,
    mla,
    read,
    values,
    write_file,
)
from vllm.fp8_inc.sources.inc.files import measurement_files, scale_files
from vllm.fp8_inc.sources.inc.schema import QuantConfig

K = "model.layers.0.self_attn.attn.impl.k_cache"
MOE = "model.layers.1.mlp.experts.routed_experts.moe_op"
NAN = float("nan")


def names(scales):
    return [path.rpartition("/")[2] for path in scales.files]


@pytest.mark.parametrize("observer", ["maxabs", "maxabs_per_channel"])
@pytest.mark.parametrize(
    "method", ["maxabs_hw", "ACT_MAXABS_POW2_WEIGHTS_PCS_OPT_POW2"]
)
def test_names_are_those_that_inc_makes(tmp_path, observer, method):
    content = {
        "dump_stats_path": f"{tmp_path}/a.b/out",
        "observer": observer,
        "scale_method": method,
    }
    cfg = inc_oracle.parse(content)  # makes the folder
    config = QuantConfig.model_validate(content)
    assert str(measurement_files(config).base) == cfg["measure_file"]
    assert str(scale_files(config).base) == cfg["scale_file"]
    for ending in ("_1_2.json", ".json", "_1_2_mod_list.json", "_x.json", "_1_2.txt"):
        (tmp_path / "a.b" / f"out_hooks_{observer}{ending}").touch()
        (
            tmp_path / "a.b" / f"out_hooks_{observer}_MAXABS_HW_OPT_WEIGHT{ending}"
        ).touch()
    found = measurement_files(config).ranks
    assert {size: list(ranks) for size, ranks in found.items()} == {2: [1], 1: [0]}
    assert not scale_files(config).ranks


def test_cached_scales_go_before_measurements_unless_they_are_recomputed(tmp_path):
    write_file(tmp_path, mha(0, 3.0, 0.5))
    scales = {path: cached(*[0.25] * 4) for path in mha(0, 1, 1)}
    scales[K] = cached(2.0)
    write_file(tmp_path, scales, "_MAXABS_HW", "Scale")
    found = read(tmp_path)
    assert values(found, "layers.0")["k"] == 2.0
    assert found.attention["layers.0"]["k"].key == K
    assert names(found) == [
        "inc_output_hooks_maxabs_MAXABS_HW.json",
        "inc_output_hooks_maxabs.json",
    ]
    for keys in (
        {"recalc_scales": True},
        {
            "scale_method": {
                "default": {
                    "weight": {"rounding_method": "HW_ALIGNED", "backoff": 0.5},
                    "activation": {"rounding_method": "HW_ALIGNED", "backoff": 0.25},
                }
            }
        },
        {"scale_method": "maxabs_pow2"},
    ):
        found = read(tmp_path, **keys)
        assert values(found, "layers.0")["k"] == 0.03125
        assert names(found) == ["inc_output_hooks_maxabs.json"]


def test_what_the_cached_file_lacks_is_computed(tmp_path):
    write_file(tmp_path, mha(0, 3.0, 0.5) | mha(1, 30.0, 0.125))
    scales = {path: cached(*[0.25] * 4) for path in mha(0, 1, 1)}
    write_file(tmp_path, scales, "_MAXABS_HW", "Scale")
    found = read(tmp_path)
    assert values(found, "layers.0")["v"] == 0.25
    assert values(found, "layers.1") == {
        "k": 0.5,
        "v": 2.0**-9,
        "q": 0.125,
        "q_decode": 2.0**-7,
        "prob": 2.0**-6,
    }


def test_cached_scales_serve_without_measurements(tmp_path):
    scales = {path: cached(*[0.25, 0.5, 1.0, 0.015625]) for path in mha(0, 1, 1)}
    write_file(tmp_path, scales, "_MAXABS_HW_0_1", "Scale")
    (tmp_path / "inc_output_hooks_maxabs_0_1.npz").write_bytes(b"PK")
    found = read(tmp_path)
    assert values(found, "layers.0")["q"] == 0.25
    assert names(found) == ["inc_output_hooks_maxabs_MAXABS_HW_0_1.json"]


@pytest.mark.parametrize("suffix", ["", "_0_1", "_MAXABS_HW_0_1"])
def test_a_lone_npz_is_never_unpickled(tmp_path, suffix):
    (tmp_path / f"inc_output_hooks_maxabs{suffix}.npz").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    text = str(error.value)
    assert f"hooks_maxabs{suffix}.npz is there without its JSON" in text
    assert "json.dump" in text


def test_the_advice_for_a_lone_npz_gives_the_json(tmp_path):
    """INC's own .npz, exported by the command of the message."""
    import re
    import subprocess
    import sys

    import numpy as np

    nodes = {K: {"inputs": [np.array([[3.5]], np.float32)], "params": {}}}
    path = tmp_path / "inc_output_hooks_maxabs.npz"
    np.savez(path, {"LocalRank": None, "Mode": "DynamicRange", "Nodes": nodes})
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    command = re.search(r"python -c '(.*)'$", str(error.value))[1]
    subprocess.run([sys.executable, "-c", command, str(path)], check=True)
    content = json.loads(path.with_suffix(".json").read_text())
    assert content["Nodes"][K]["inputs"] == [[[3.5]]]


def test_a_relative_path_is_relative_to_where_the_server_starts(tmp_path, monkeypatch):
    write_file(tmp_path, mha(0, 3.0, 0.5))
    monkeypatch.chdir(tmp_path)
    assert read(tmp_path, dump_stats_path="./inc_output").attention
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ValueError) as error:
        read(tmp_path, dump_stats_path="./inc_output")
    assert "'./inc_output' is relative to the folder where the server" in str(
        error.value
    )
    assert str(tmp_path.parent) in str(error.value)


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    for part in (
        "quant.json: there is no ",
        "inc_output_hooks_maxabs_MAXABS_HW[_RANK_WORLDSIZE].json and no ",
        "inc_output_hooks_maxabs[_RANK_WORLDSIZE].json",
        "dump_stats_path",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "content, part",
    [
        ("{", "Expecting"),
        ("[]", "the file"),
        ({"Mode": "DynamicRange"}, "the file.Nodes: Field required"),
        ({"Mode": "Scale", "Nodes": {}}, "\"Mode\" is 'Scale'"),
        ({"Mode": "DynamicRange", "Nodes": {K: 3}}, K),
        ({"Mode": "DynamicRange", "Nodes": {K: {"inputs": 3}}}, f"{K}.inputs"),
        (
            {"Mode": "DynamicRange", "Nodes": {K: measured(NAN)}},
            f"{K}: nan is no positive finite number",
        ),
        (
            {"Mode": "DynamicRange", "Nodes": {MOE: measured(1, outputs=[1, NAN])}},
            f"{MOE}: nan is no positive finite number",
        ),
        ({"Mode": "DynamicRange", "Nodes": {K: measured(-1.0)}}, f"{K}: -1.0 is no"),
        ({"Mode": "DynamicRange", "Nodes": {K: measured("3")}}, f"{K}: '3' is no"),
        ({"Mode": "DynamicRange", "Nodes": {K: measured(True)}}, f"{K}: True is no"),
        ({"Mode": "DynamicRange", "Nodes": {K: {"inputs": [[]]}}}, f"{K}: [] is no"),
    ],
    ids=str,
)
def test_a_file_that_inc_did_not_write(tmp_path, content, part):
    path = tmp_path / "inc_output_hooks_maxabs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert part in text, text
    assert "alibrate again" in text


@pytest.mark.parametrize("garbage", [NAN, 1e36, float("inf")])
def test_the_output_that_inc_did_not_write_is_not_read(tmp_path, garbage):
    """On one rank it measures a torch.empty(1) in place of the sum over ranks."""
    path = "model.layers.0.self_attn.o_proj"
    o_proj = {path: measured(3.0, outputs=[4.0, garbage], weight=1.0)}
    write_file(tmp_path, mha(0, 3.0, 0.5) | o_proj)
    found = read(tmp_path)
    assert values(found, "layers.0")["k"] == 0.03125
    assert found.linears[path].input_dequant_scale == 0.03125


def test_the_old_names_of_inputs_and_a_channel_each(tmp_path):
    nodes = mha(0, 3.0, 0.5)
    nodes[K] = {"input": [[[1.0], [30.0], [2.0]]]}
    write_file(tmp_path, nodes)
    assert values(read(tmp_path), "layers.0")["k"] == 0.5


def two_ranks(tmp_path, suffix=""):
    write_file(tmp_path, mha(0, 3.0, 30.0, q=100.0), "_0_2")
    write_file(tmp_path, mha(0, 50.0, 0.5, q=1.0), "_1_2")


def test_each_rank_takes_its_own_where_world_sizes_agree(tmp_path):
    two_ranks(tmp_path)
    zero, one = read(tmp_path, rank=0, size=2), read(tmp_path, rank=1, size=2)
    assert (values(zero, "layers.0")["k"], zero.ranks) == (0.03125, "rank 0 of 2")
    assert (values(one, "layers.0")["k"], one.ranks) == (0.5, "rank 1 of 2")


@pytest.mark.parametrize("rank, size", [(0, 1), (0, 4), (3, 4)])
def test_other_world_sizes_take_the_largest_and_say_so(tmp_path, rank, size):
    two_ranks(tmp_path)
    found = read(tmp_path, rank=rank, size=size)
    layer = values(found, "layers.0")
    assert (layer["k"], layer["v"], layer["q"]) == (0.5, 0.5, 1.0)
    assert found.ranks == f"the largest of ranks 0 to 1, served on {size}"
    assert len(found.files) == 2


def test_a_calibration_on_one_rank_serves_any_number(tmp_path):
    write_file(tmp_path, mha(0, 3.0, 0.5), "_0_1")
    write_file(tmp_path, mha(0, 50.0, 50.0))  # without ranks: left from another time
    found = read(tmp_path, rank=5, size=8)
    assert values(found, "layers.0")["k"] == 0.03125
    assert found.ranks == "made on one rank, served on 8"
    common = read(tmp_path, rank=5, size=8, seperate_measure_files=False)
    assert values(common, "layers.0")["k"] == 0.5


@pytest.mark.parametrize("size, missing", [(2, "0"), (1, "0, 2")])
def test_a_missing_rank_is_named(tmp_path, size, missing):
    world = 2 if size == 2 else 4
    for rank in range(world):
        if str(rank) not in missing:
            write_file(tmp_path, mha(0, 3.0, 0.5), f"_{rank}_{world}")
    with pytest.raises(ValueError) as error:
        read(tmp_path, size=size)
    assert f"hooks_maxabs_0_{world}.json is missing" in str(error.value)
    assert f"(rank {missing} of {world})" in str(error.value)


def test_files_of_several_calibrations_are_not_mixed(tmp_path):
    two_ranks(tmp_path)
    write_file(tmp_path, mha(0, 3.0, 0.5), "_0_1")
    assert read(tmp_path).ranks == "rank 0 of 1"
    with pytest.raises(ValueError, match="made on 1 and on 2 ranks, but 4 serve"):
        read(tmp_path, size=4)


def test_ranks_with_other_modules(tmp_path):
    """Pipeline stages have their own layers; a module has its inputs everywhere."""
    write_file(tmp_path, mha(0, 3.0, 0.5), "_0_2")
    write_file(tmp_path, mha(1, 50.0, 0.5), "_1_2")
    assert read(tmp_path).attention.keys() == {"layers.0", "layers.1"}
    write_file(tmp_path, {K: measured(3.0, 4.0)}, "_1_2")
    with pytest.raises(ValueError, match="k_cache has 2 inputs on rank 1, but 1 on"):
        read(tmp_path)


def test_unified_samples_are_the_largest_of_their_ranks():
    """tiny_mha_g3_tp2_unified joins the two files as vllm-gaudi does."""
    ranks = SAMPLES / "tiny_mha_g3_tp2_inc310"
    unified = SAMPLES / "tiny_mha_g3_tp2_unified"

    def of(folder, **keys):
        config = {"dump_stats_path": f"{folder}/inc_output"} | keys
        return read_sample(config)

    for keys in ({}, {"recalc_scales": True}):
        ours, theirs = of(ranks, **keys), of(unified, **keys)
        assert len(ours.attention) == 2
        for layer in theirs.attention:
            assert values(ours, layer) == values(theirs, layer)
        assert ours.linears == theirs.linears


def read_sample(config, size=1):
    import tempfile
    from pathlib import Path

    from vllm.fp8_inc.sources.inc.read import read_inc_scales

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quant.json"
        path.write_text(json.dumps(config))
        return read_inc_scales(str(path), "gaudi3", 0, size)


@pytest.mark.parametrize("size", [2, 1])
def test_a_latent_that_is_not_the_same_on_all_ranks(tmp_path, caplog_vllm, size):
    write_file(tmp_path, mla(0, 3.0, q=1.0), "_0_2")
    write_file(tmp_path, mla(0, 3.0, q=2.0), "_1_2")
    read(tmp_path, size=size)
    assert not caplog_vllm.records
    write_file(tmp_path, mla(0, 30.0, q=2.0), "_1_2")
    found = read(tmp_path, size=size)
    (text,) = [r.getMessage() for r in caplog_vllm.records]
    assert "latent_cache_k has dequant scale" in text
    assert "0.5" in text and "same on every rank" in text
    assert values(found, "layers.0")["k"] == (0.03125 if size == 2 else 0.5)


def test_other_json_in_the_folder_is_passed_by(tmp_path):
    shutil.copytree(SAMPLES / "tiny_mha_g3_tp2_inc310", tmp_path, dirs_exist_ok=True)
    (tmp_path / "notes.json").write_text("{")
    (tmp_path / "inc_output_hooks_maxabs_MAXABS_POW2_0_2.json").write_text("{")
    assert len(read(tmp_path, size=2).files) == 2
