# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales reach every layer of a real engine, or the start says why not."""

import re

import pytest
import torch

from tests.checkpoints import (
    BUILDERS,
    checkpoint,
    deepseek_config,
    fp8_static,
    kv_scales,
    llama_config,
    quantization_config,
    quantize,
    weights,
    write,
)
from tests.engines import (
    acting,
    ask,
    attention_layers,
    engine,
    loaded,
    model_of,
    prompt,
)

LAYER = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    "kind, shape, dtype",
    [
        ("mla", [1], torch.float32),
        ("gqa", [], torch.bfloat16),
        ("gqa", [1, 1, 1], torch.float16),
        pytest.param("gqa", [1], torch.float32, marks=pytest.mark.slow),
        pytest.param("mla", [], torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("mla", [1, 1, 1], torch.float16, marks=pytest.mark.slow),
    ],
)
def test_each_layer_gets_its_own_scales(tmp_path, kind, shape, dtype):
    scales = kv_scales(BUILDERS[kind]())
    scales = {key: s.view(shape).to(dtype) for key, s in scales.items()}
    with engine(checkpoint(tmp_path, kind, scales)) as llm:
        found = loaded(llm)
    assert len(found) == 3
    for n, layer in enumerate(found):
        value = {
            role: acting(scales[f"model.layers.{n}.self_attn.{role}_scale"].item())
            for role in "qkv"
        }
        k = value["v"] if kind == "mla" else value["k"]
        assert layer == {"k": k, "v": value["v"], "q": value["q"]}


def test_mla_takes_the_larger_whichever_it_is(tmp_path):
    scales = kv_scales(deepseek_config())
    scales[f"{LAYER}.k_scale"] = torch.tensor([0.5])
    with engine(checkpoint(tmp_path, "mla", scales)) as llm:
        layer = loaded(llm)[1]
    assert layer["k"] == layer["v"] == acting(0.5)


@pytest.mark.parametrize(
    "served, flavor, environment, factor",
    [
        ("gaudi2", None, None, 448 / 240),
        ("gaudi3", "float8_e4m3fnuz", None, 240 / 448),
        ("gaudi2", "float8_e4m3fnuz", None, 1),
        ("gaudi2", None, "false", 1),
        ("gaudi3", None, "true", 240 / 448),
    ],
)
def test_adjustment_reaches_the_layers(
    tmp_path, monkeypatch, served, flavor, environment, factor
):
    if environment is not None:
        monkeypatch.setenv("VLLM_SCALE_ADJUSTMENT", environment)
    quantization = {"fp8_dtype_flavor": flavor} if flavor else {}
    path = checkpoint(tmp_path, "gqa", **quantization)
    options = {"additional_config": {"fp8_inc": {"device": served}}}
    with engine(path, **options) as llm:
        found = loaded(llm)
    for n, layer in enumerate(found):
        assert layer["k"] == acting((0.011 + 0.005 * n) * factor)


@pytest.mark.parametrize("kind", ["mla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_auto_ignores_the_scales(tmp_path, kind):
    config = BUILDERS[kind]()
    with_scales = checkpoint(tmp_path / "with", kind)
    without = write(tmp_path / "without", config, weights(config))
    answers = []
    for path in (with_scales, without):
        with engine(path, kv_cache_dtype="auto") as llm:
            cache = attention_layers(llm)[0].kv_cache
            assert cache.dtype == torch.bfloat16
            answers.append(ask(llm, [prompt(30)])[0])
    assert answers[0].tokens == answers[1].tokens
    assert torch.equal(answers[0].logprobs, answers[1].logprobs)


def test_legacy_scales_are_not_dropped_in_silence(tmp_path, caplog_vllm):
    options = {"fp8_inc": {"legacy_scales": str(tmp_path / "scales.json")}}
    path = checkpoint(tmp_path, "gqa")
    with engine(path, kv_cache_dtype="auto", additional_config=options):
        pass
    assert "legacy_scales is not used" in caplog_vllm.text


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
def test_mla_serves_a_bfloat16_cache(tmp_path, dtype):
    """It is what auto gives a bf16 model; a float32 model rounds into it."""
    path = checkpoint(tmp_path, "mla")
    answers = []
    for cache in ("auto", "bfloat16"):
        with engine(path, kv_cache_dtype=cache, dtype=dtype) as llm:
            answers.append(ask(llm, [prompt(30)])[0].logprobs)
    equal = torch.equal(*answers)
    assert equal == (dtype == "bfloat16")
    torch.testing.assert_close(*answers, atol=0.5, rtol=0)


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_checkpoint_without_scales_runs_on_unit_scales(tmp_path, kind, caplog_vllm):
    config = BUILDERS[kind]()
    with engine(write(tmp_path, config, weights(config))) as llm:
        assert all(layer["k"] == layer["v"] == 1.0 for layer in loaded(llm))
    assert "dequant_scale 1.0 for all 3 layers" in caplog_vllm.text


def test_missing_scales_can_be_allowed(tmp_path, caplog_vllm):
    scales = kv_scales(llama_config())
    del scales[f"{LAYER}.k_scale"]
    path = checkpoint(tmp_path, "gqa", scales)
    options = {"additional_config": {"fp8_inc": {"missing_scales": "unit"}}}
    with engine(path, **options) as llm:
        first, second, _ = loaded(llm)
    assert second["k"] == second["v"] == 1.0
    assert first["k"] == acting(0.011)
    assert "missing_scales=unit: dequant_scale 1.0 for 1 layers" in caplog_vllm.text


def test_one_line_says_what_was_loaded(tmp_path, caplog_vllm):
    with engine(checkpoint(tmp_path, "mla", fp8_dtype_flavor="float8_e4m3fnuz")):
        pass
    lines = [line for line in caplog_vllm.messages if line.startswith("fp8_inc:")]
    assert len(lines) == 1
    for part in (
        "3 of 3 layers",
        "llm-compressor (attention)",
        "gaudi2",
        "gaudi3",
        "x 0.5357",
    ):
        assert part in lines[0]


@pytest.mark.parametrize("kind", ["mla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_reloaded_weights_bring_their_scales(tmp_path, kind):
    first, second = (
        fp8_static(tmp_path / "a", kind),
        fp8_static(tmp_path / "b", kind, 2),
    )
    answers = {}
    for path in (first, second):
        with engine(path) as llm:
            answers[path] = ask(llm, [prompt(30)])[0], loaded(llm)
    assert answers[first][1] != answers[second][1]
    with engine(first) as llm:
        for path in (second, first):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            llm.reset_prefix_cache()
            answer, scales = answers[path]
            assert loaded(llm) == scales
            assert torch.equal(ask(llm, [prompt(30)])[0].logprobs, answer.logprobs)


def test_an_update_without_scales_keeps_them(tmp_path, caplog_vllm):
    with engine(checkpoint(tmp_path, "gqa")) as llm:
        before = loaded(llm)
        norm = ("model.norm.weight", weights(llama_config())["model.norm.weight"])
        model_of(llm).load_weights(iter([norm]))
        assert loaded(llm) == before
    assert "no KV scales among the new weights" in caplog_vllm.text


BAD = {
    "zero": (f"{LAYER}.k_scale", torch.tensor([0.0]), "is 0.0"),
    "NaN": (f"{LAYER}.v_scale", torch.tensor([torch.nan]), "is nan"),
    "infinite": (f"{LAYER}.k_scale", torch.tensor([torch.inf]), "is inf"),
    "negative": (f"{LAYER}.q_scale", torch.tensor([-0.5]), "is -0.5"),
    "two values": (f"{LAYER}.k_scale", torch.tensor([0.1, 0.2]), "is 'tensor'"),
    "a matrix": (f"{LAYER}.k_scale", torch.full([2, 2], 0.1), "shape (2, 2)"),
    "no value": (f"{LAYER}.k_scale", torch.empty(0), "shape (0,)"),
    "integer": (f"{LAYER}.k_scale", torch.tensor([1]), "dtype torch.int64"),
    "subnormal": (f"{LAYER}.k_scale", torch.tensor([1e-40]), "subnormal"),
    "huge": (f"{LAYER}.v_scale", torch.tensor([1e31]), "is 1e+31"),
    "zero-point": (f"{LAYER}.v_zero_point", torch.tensor([3]), "must be 0"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kind", ["mla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_a_bad_scale_stops_the_start(tmp_path, kind, case):
    key, tensor, expected = BAD[case]
    scales = kv_scales(BUILDERS[kind]())
    scales[key] = tensor.clone()
    path = checkpoint(tmp_path, kind, scales)
    with pytest.raises(ValueError) as caught, engine(path):
        pass
    message = str(caught.value)
    for part in (str(tmp_path / "model.safetensors"), key, expected):
        assert part in message


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("roles", ["k", "v", "kv"])
def test_a_missing_scale_stops_the_start(tmp_path, kind, roles):
    scales = kv_scales(BUILDERS[kind]())
    for role in roles:
        del scales[f"{LAYER}.{role}_scale"]
    path = checkpoint(tmp_path, kind, scales)
    with pytest.raises(ValueError) as caught, engine(path):
        pass
    for part in (path, f"{LAYER}.{roles[0]}_scale", "missing_scales"):
        assert part in str(caught.value)


def test_declared_but_none_present_stops_the_start(tmp_path):
    path = checkpoint(tmp_path, "mla", scales={})
    with pytest.raises(ValueError, match="kv_cache_scheme"), engine(path):
        pass


@pytest.mark.parametrize(
    "key, message",
    [
        ("model.layers.7.self_attn.k_scale", "belongs to no attention layer"),
        ("other.layers.2.self_attn.k_scale", "are both for k of layers.2"),
        ("model.layers.2.self_attn.k_cache.scale", "are both for k of layers.2"),
    ],
)
def test_a_scale_of_no_layer_stops_the_start(tmp_path, key, message):
    scales = kv_scales(llama_config()) | {key: torch.tensor([0.3])}
    path = checkpoint(tmp_path, "gqa", scales)
    with pytest.raises(ValueError, match=message) as caught, engine(path):
        pass
    assert key in str(caught.value)


@pytest.mark.parametrize(
    "name, value", [("num_bits", 4), ("dynamic", True), ("strategy", "group")]
)
def test_an_unknown_scheme_stops_the_start(tmp_path, name, value):
    scheme = quantization_config()["kv_cache_scheme"] | {name: value}
    path = checkpoint(tmp_path, "mla", kv_cache_scheme=scheme)
    with pytest.raises(ValueError) as caught, engine(path):
        pass
    assert f"kv_cache_scheme.{name} is {value!r}" in str(caught.value)


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"device": "gaudi4"}, ["device", "gaudi4"]),
        ({"devise": "gaudi2"}, ["devise", "gaudi2"]),
        ({"missing_scales": 1.0}, ["missing_scales", "1.0"]),
    ],
)
def test_a_wrong_option_stops_the_start(tmp_path, options, parts):
    path = checkpoint(tmp_path, "mla")
    wrong = {"additional_config": {"fp8_inc": options}}
    with pytest.raises(ValueError) as caught, engine(path, **wrong):
        pass
    assert all(part in str(caught.value) for part in parts)


def test_fp8_weights_with_a_missing_scale_stop_the_start(tmp_path):
    config = deepseek_config()
    config["quantization_config"] = quantization_config()
    tensors = quantize(weights(config)) | kv_scales(config)
    del tensors["model.layers.1.mlp.experts.2.down_proj.input_scale"]
    path = write(tmp_path, config, tensors)
    expected = r"layers\.1\.mlp\.experts.*input_scale"
    with pytest.raises(ValueError, match=expected), engine(path):
        pass


@pytest.mark.parametrize("size", [-100, 50, 0])
def test_a_shard_cut_short_is_named(tmp_path, size):
    path = checkpoint(tmp_path, "gqa")
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    expected = rf"{re.escape(str(shard))} cannot be read .*download it again"
    with pytest.raises(ValueError, match=expected), engine(path):
        pass
