# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The legacy JSON is read for one rank, or refused with file, key and value."""

import json

import pytest

from vllm.fp8_inc.formats import GAUDI2, GAUDI3
from vllm.fp8_inc.sources.legacy_json import read_legacy_scales

RANKS = {"0": {"0": 0.25, "1": 0.5}, "1": {"0": 2, "1": 0.125}}


def document(**changes):
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": RANKS}
    return {"model_type": "llama", "kv_cache": cache | changes}


def read(tmp_path, content, rank=0, world_size=2, model_type="llama"):
    path = tmp_path / "scales.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_legacy_scales(str(path), model_type, rank, world_size, GAUDI3)


def values_of(scales):
    """Layer number -> dequant scale, which K and V have in common."""
    for roles in scales.found.values():
        assert roles["k"] == roles["v"] and set(roles) == {"k", "v"}
    return {
        int(layer.removeprefix("layers.")): roles["k"].dequant_scale
        for layer, roles in scales.found.items()
    }


@pytest.mark.parametrize(
    "rank, world_size, values, ranks",
    [
        (0, 2, {0: 0.25, 1: 0.5}, "rank 0 of 2"),
        (1, 2, {0: 2.0, 1: 0.125}, "rank 1 of 2"),
        (0, 1, {0: 2.0, 1: 0.5}, "the largest of ranks [0, 1], served on 1"),
        (3, 4, {0: 2.0, 1: 0.5}, "the largest of ranks [0, 1], served on 4"),
    ],
)
def test_a_rank_takes_its_own_or_the_largest(tmp_path, rank, world_size, values, ranks):
    scales = read(tmp_path, document(), rank, world_size)
    path = str(tmp_path / "scales.json")
    assert values_of(scales) == values
    assert (scales.path, scales.source) == (path, f"{path} ({ranks})")
    assert scales.found["layers.1"]["k"].key == "kv_cache.scaling_factor.*.1"


def test_as_many_ranks_with_other_numbers_are_not_taken_for_ones_own(tmp_path):
    content = document(scaling_factor={"1": {"0": 0.5}, "2": {"0": 0.25}})
    assert values_of(read(tmp_path, content)) == {0: 0.5}


@pytest.mark.parametrize(
    "dtype, made_for", [("float8_e4m3fn", GAUDI3), ("float8_e4m3fnuz", GAUDI2)]
)
def test_the_flavour_is_kept(tmp_path, dtype, made_for):
    adjustment = read(tmp_path, document(dtype=dtype)).adjustment
    assert (adjustment.quantised_for, adjustment.served_on) == (made_for, GAUDI3)


def test_a_file_or_a_model_without_a_type_is_not_compared(tmp_path):
    assert read(tmp_path, document() | {"model_type": None})
    assert read(tmp_path, document(), model_type=None)


def scales_of(value):
    return document(scaling_factor={"0": {"0": 0.5, "7": value}})


@pytest.mark.parametrize(
    "content, parts",
    [
        (scales_of(0), ["scaling_factor.0.7 is 0.0", "positive"]),
        (scales_of(-0.5), ["scaling_factor.0.7 is -0.5"]),
        (scales_of(float("nan")), ["scaling_factor.0.7 is nan"]),
        (scales_of(float("inf")), ["scaling_factor.0.7 is inf"]),
        (scales_of(1e-40), ["scaling_factor.0.7 is 1e-40", "subnormal"]),
        (scales_of(2e30), ["scaling_factor.0.7 is 2e+30"]),
        (scales_of("0.5"), ["scaling_factor.0.7", "'0.5'"]),
        (scales_of(True), ["scaling_factor.0.7", "True"]),
        (scales_of(None), ["scaling_factor.0.7", "None"]),
        (scales_of([0.5]), ["scaling_factor.0.7", "[0.5]"]),
        (document(scaling_factor={"0": {"x": 0.5}}), ["scaling_factor.0.x", "'x'"]),
        (document(scaling_factor={"-1": {"0": 0.5}}), ["scaling_factor.-1"]),
        (document(scaling_factor={"0": {"00": 0.5}}), ["scaling_factor.0.00"]),
        (document(scaling_factor={}), ["scaling_factor has no scales"]),
        (document(scaling_factor={"0": {}}), ["scaling_factor has no scales"]),
        (
            document(scaling_factor={"0": {"0": 0.5}, "1": {"0": 0.5, "4": 0.5}}),
            ["layers [4]", "ranks 0 and 1"],
        ),
        (document(dtype="float8_e5m2"), ["kv_cache.dtype", "'float8_e5m2'"]),
        (document(zero_point=0), ["kv_cache.zero_point", "0"]),
        (document() | {"weight": {"a": 1}}, ["weight", "{'a': 1}"]),
        ({"model_type": "llama"}, ["kv_cache", "required"]),
        ([], ["the file is []"]),
        (document() | {"model_type": "gpt2"}, ["model_type", "'gpt2'", "'llama'"]),
        ('{"kv_cache": {}, "kv_cache": {}}', ["'kv_cache' is there twice"]),
        ("{", ["is no JSON"]),
        ("[" * 100_000, ["is no JSON"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, parts):
    with pytest.raises(ValueError) as error:
        read(tmp_path, content)
    text = str(error.value)
    assert text.startswith(str(tmp_path / "scales.json"))
    assert all(part in text for part in parts), text
    assert "\n" not in text


def test_a_file_that_is_not_there_is_named(tmp_path):
    path = str(tmp_path / "none.json")
    with pytest.raises(ValueError, match="legacy_scales.*none.json cannot be read"):
        read_legacy_scales(path, "llama", 0, 1, GAUDI3)
