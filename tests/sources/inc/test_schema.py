# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The configuration means what INC makes of it, or is refused with a way out."""

import json

import pytest

from tests.sources.inc import inc_oracle
from tests.sources.inc.helpers import SAMPLES
from vllm.fp8_inc.sources.inc.config_file import read_config
from vllm.fp8_inc.sources.inc.rules import DYNAMIC_ONLY, METHODS
from vllm.fp8_inc.sources.inc.schema import QuantConfig


def write(tmp_path, content):
    path = tmp_path / "quant.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def config(tmp_path, **keys):
    return read_config(write(tmp_path, {"dump_stats_path": f"{tmp_path}/x"} | keys))


def test_defaults_are_incs(tmp_path):
    theirs = inc_oracle.parse({"dump_stats_path": f"{tmp_path}/x", "use_qdq": True})
    ours = config(tmp_path, use_qdq=True)
    same = (
        "observer ignore_modules_wo_measures recalc_scales fake_quant use_qdq "
        "measure_on_hpu dynamic_quantization seperate_measure_files scale_params "
        "row_parallel_linear_allreduce_quantization calibration_sample_interval "
        "mod_dict"
    )
    for key in same.split():
        assert getattr(ours, key) == theirs[key], key
    for key in ("mode", "scale_format", "measure_exclude"):
        assert getattr(ours, key) == theirs[key].name, key
    assert ours.dtype == theirs["hp_dtype"]
    assert ours.device_for_scales is theirs["device_for_scales"] is None
    assert QuantConfig.model_fields["dump_stats_path"].default == "stats"
    unread = {"global_rank", "local_rank", "world_size", "device_type"}
    derived = {key for key in theirs if key.endswith(("_file", "_files", "_base_path"))}
    rest = theirs.keys() - unread - derived
    assert rest <= QuantConfig.model_fields.keys()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_is_known_in_any_case(tmp_path, method):
    keys = {"dynamic_quantization": "True"} if method in DYNAMIC_ONLY else {}
    ours = config(tmp_path, scale_method=method.title(), **keys)
    assert ours.scale_method.method == method
    assert method in {m.name for m in inc_oracle.METHODS}
    assert len(inc_oracle.METHODS) == len(METHODS)


@pytest.mark.parametrize(
    "key, value, meant",
    [
        ("mode", "quantize", "QUANTIZE"),
        ("recalc_scales", "tRUE", True),
        ("recalc_scales", False, False),
        ("scale_format", "const", "CONST"),
        ("hp_dtype", "bf16", "BF16"),
        ("fp8_config", "e4m3", "E4M3"),
        ("device_for_scales", "gaudi3", "GAUDI3"),
        ("measure_exclude", "none", "NONE"),
        ("measure_on_hpu", "false", False),
        ("fake_quant", "true", True),
    ],
)
def test_values_in_any_case(tmp_path, key, value, meant):
    inc_oracle.parse({"dump_stats_path": f"{tmp_path}/x", key: value})
    assert getattr(config(tmp_path, **{key: value}), key) == meant


@pytest.mark.parametrize(
    "keys",
    [
        {"mode": "SERVE"},
        {"scale_method": "maxabs"},
        {"scale_method": 3},
        {"scale_method": {"nodes": {}}},
        {"scale_method": {"default": {"weight": {"rounding_method": "up"}}}},
        {
            "scale_method": {
                "default": {"activation": {"rounding_method": "scale_unit"}}
            }
        },
        {"scale_format": "TENSOR"},
        {"fp8_config": "E3M4"},
        {"hp_dtype": "FP64"},
        {"device_for_scales": "GAUDI1"},
        {"recalc_scales": "yes"},
        {"recalc_scales": 1},
        {"use_qdq": "0"},
        {"measure_exclude": "WEIGHTS"},
        {"dump_stats_path": "stats"},
        {"scale_method": "maxabs_pcs_pow2"},
        {"scale_method": "maxabs_hw", "dynamic_quantization": True, "use_qdq": False},
        {"dynamic_quantization": True, "use_qdq": True},
    ],
    ids=str,
)
def test_what_inc_refuses_is_refused_by_name(tmp_path, keys):
    with pytest.raises(Exception):  # noqa: B017 (INC raises what comes)
        inc_oracle.parse({"dump_stats_path": f"{tmp_path}/x"} | keys)
    with pytest.raises(ValueError) as error:
        config(tmp_path, **keys)
    text = str(error.value)
    assert text.startswith(f"{tmp_path}/quant.json: ")
    assert list(keys)[0] in text
    assert "\n" not in text


PCS = "maxabs_pcs_pow2"


@pytest.mark.parametrize(
    "keys, parts",
    [
        ({"blocklist": {"names": "lm_head"}}, ["blocklist.names", "['lm_head']"]),
        ({"allowlist": {"types": "Matmul"}}, ["allowlist.types", "'Matmul'"]),
        ({"blocklist": {"names": ["a(b"]}}, ["blocklist.names", "'a(b'", "escape"]),
        ({"blocklist": {"names": [3]}}, ["blocklist.names.0", "3"]),
        ({"blocklist": ["lm_head"]}, ["blocklist is ['lm_head']"]),
        ({"mode": "MEASURE"}, ['"MEASURE" calibrates', "QUANTIZE configuration"]),
        ({"mode": "shape"}, ['"SHAPE" records shapes']),
        ({"mode": "NONE"}, ["quantises nothing; unset QUANT_CONFIG"]),
        ({"mode": "LOAD"}, ["INC saved; unset QUANT_CONFIG"]),
        (
            {"mode": "MEASURE", "dynamic_quantization": True, "scale_method": PCS},
            ["dynamic_quantization", "MEASURE", "remove one"],
        ),
        ({"scale_method": PCS}, ["MAXABS_PCS_POW2", "maxabs_hw"]),
        ({"dynamic_quantization": True}, ["MAXABS_HW is static"]),
        ({"dump_stats_path": "out"}, ["'out' and names no folder", "./out"]),
        ({"fp8_config": "E5M2"}, ['"E5M2", but the cache is E4M3']),
        ({"observer": "shape"}, ['"shape" measures no amax', '"maxabs"']),
        ({"observer": "MAXABS"}, ["observer is 'MAXABS'"]),
        ({"mod_dict": {"Linear": "linear"}}, ["mod_dict"]),
        ({"whitelist": {}, "allowlist": {}}, ["whitelist is the old name"]),
        (
            {"scale_method": {"default": {}, "layers": {"first": {}}}},
            ["scale_method.layers.first"],
        ),
        (
            {"scale_method": {"default": {"activation": {"backoff": 0}}}},
            ["scale_method.default.activation.backoff is 0"],
        ),
        (
            {"scale_method": {"default": {}, "is_written_out": False}},
            ["is_written_out is no key"],
        ),
        (
            {
                "dynamic_quantization": True,
                "scale_method": PCS,
                "row_parallel_linear_allreduce_quantization": True,
            },
            ["row_parallel_linear_allreduce_quantization"],
        ),
    ],
    ids=str,
)
def test_what_inc_would_take_or_crash_on_is_refused_with_a_way_out(
    tmp_path, keys, parts
):
    with pytest.raises(ValueError) as error:
        config(tmp_path, **keys)
    text = str(error.value)
    assert text.startswith(f"{tmp_path}/quant.json: ")
    assert all(part in text for part in parts), text
    assert "\n" not in text


@pytest.mark.parametrize(
    "content, part",
    [
        ("{", "is no JSON"),
        ("[]", "the file is []"),
        ('{"mode": "QUANTIZE", "mode": "MEASURE"}', "'mode' is there twice"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, content, part):
    with pytest.raises(ValueError) as error:
        read_config(write(tmp_path, content))
    assert "quant.json" in str(error.value)
    assert part in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match="QUANT_CONFIG: nowhere.json cannot be read"):
        read_config("nowhere.json")


def test_unknown_keys_are_named_in_one_warning(tmp_path, caplog_vllm):
    config(
        tmp_path,
        recalculate=True,
        blocklist={"name": ["x"]},
        scale_method={
            "default": {"activation": {"rounding_method": "POW2", "back_off": 1}}
            | {"weight": {"rounding_method": "POW2"}},
            "experts": {},
        },
    )
    (text,) = [r.getMessage() for r in caplog_vllm.records]
    for key in (
        "blocklist.name",
        "recalculate",
        "scale_method.default.activation.back_off",
        "scale_method.experts",
    ):
        assert key in text


def test_backoffs_that_inc_no_longer_reads_are_pointed_out(tmp_path, caplog_vllm):
    config(tmp_path, scale_params={"input_backoff": 0.7, "weight_backoff": 1})
    (text,) = [r.getMessage() for r in caplog_vllm.records]
    assert "scale_params.input_backoff, scale_params.weight_backoff" in text
    assert "has no effect in INC 3.10" in text
    cfg = inc_oracle.parse(
        {"dump_stats_path": f"{tmp_path}/x", "scale_params": {"input_backoff": 0.7}}
    )
    (rules,) = cfg["scale_method"].values()
    assert {rule.backoff for rule in rules.values()} == {0.25, 0.5}


def test_what_intels_calibration_scripts_write_is_read_without_a_word(
    tmp_path, caplog_vllm
):
    """The keys of calibrate_model.sh, and the samples'."""
    config(
        tmp_path,
        method="HOOKS",
        quantize_weight=False,
        calibration_sample_interval=1,
        scale_format="scalar",
        allowlist={"types": [], "names": []},
        blocklist={"types": [], "names": ["lm_head", "mlp\\.gate\\b"]},
    )
    for path in SAMPLES.glob("*/maxabs_quantize.json"):
        assert read_config(str(path)).scale_method.method == "MAXABS_HW"
    assert not caplog_vllm.records


PATHS = {
    "model.layers.3.self_attn.attn.impl.k_cache": "VLLMKVCache",
    "model.layers.3.self_attn.attn.impl.matmul_qk": "Matmul",
    "model.layers.3.mlp.gate": "ReplicatedLinear",
    "model.layers.3.mlp.gate_up_proj": "MergedColumnParallelLinear",
    "model.layers.13.mlp.down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
}
LISTS = [
    {},
    {"blocklist": {"types": [], "names": ["lm_head", "mlp\\.gate\\b"]}},
    {"blacklist": {"names": ["self_attn"]}},
    {"blocklist": {"types": ["VLLMKVCache", "Matmul"]}},
    {"blocklist": {"types": ["KVCache"]}},
    {"allowlist": {"types": ["Matmul"], "names": ["layers\\.3\\.mlp"]}},
    {"allowlist": {"names": ["layers\\.3\\."]}, "blocklist": {"names": ["gate"]}},
    {"whitelist": {"types": ["VLLMKVCache"]}},
    {"blocklist": {"names": ["^layers"]}},
]


@pytest.mark.parametrize("lists", LISTS, ids=str)
def test_the_lists_choose_what_inc_chooses(tmp_path, lists):
    cfg = inc_oracle.parse({"dump_stats_path": f"{tmp_path}/x"} | lists)
    ours = config(tmp_path, **lists)
    chosen = {path for path, kind in PATHS.items() if ours.quantises(path, kind)}
    assert chosen == {
        path for path, kind in PATHS.items() if inc_oracle.quantises(cfg, path, kind)
    }
    assert chosen or lists.get("allowlist")
