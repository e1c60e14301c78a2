# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""`calibrate` leaves a checkpoint that serves with what it measured, or nothing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.checkpoints import (
    BUILDERS,
    checkpoint,
    kv_scales,
    llama_config,
    weights,
    write,
)
from tests.engines import acting, attention_layers, engine, loaded
from tests.kv_scales.command import call, examples
from tests.kv_scales.numbered import Numbered
from vllm.fp8_inc.calibration import measure
from vllm.fp8_inc.calibration.prompts import read_rows, token_ids
from vllm.fp8_inc.report import UsageError

TINY = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v2"


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    lines = [" ".join(str((7 * i * i + n) % 128) for i in range(20)) for n in range(40)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def gqa(tmp_path) -> str:
    config = llama_config()
    return write(tmp_path / "gqa", config, weights(config))


def result_of(out: Path) -> dict:
    return json.loads((out / "kv-scales-calibration.json").read_text())


def test_a_walk_from_bf16_to_served(tmp_path, capfd):
    """On the embedded model, whose tokenizer and texts are real."""
    out = tmp_path / "out"
    data = TINY.parent / "calibration-texts.jsonl"
    words = ["--dataset", data, "--num-prompts", "3", "--device", "gaudi2"]
    done = call(
        capfd, "calibrate", TINY, "--output-dir", out, *words, "--format", "json"
    )
    assert done.code == 0, done.err
    assert f"vllm serve {out} --kv-cache-dtype fp8_inc" in done.json["serve"]
    assert (out / "model.safetensors").samefile(TINY / "model.safetensors")
    result = result_of(out)
    assert result["tokens"] == done.json["tokens"] > 100
    assert (result["made_for"], result["attention"]) == ("gaudi2", "MLA")
    with engine(str(out), max_model_len=64) as llm:
        found = loaded(llm)
        absorbed = [layer.impl.scales.q_latent for layer in attention_layers(llm)]
    for n, layer in enumerate(found):
        amax = result["amax"][f"layers.{n}"]
        row = max(amax["kv_c"] + amax["k_pe"])
        assert layer["k"] == acting(row / 240 * (240 / 448))
        assert layer["q"] == acting(max(amax["q"]) / 240 * (240 / 448))
        of_decode = acting(max(amax["q_latent"]) / 240 * (240 / 448))
        assert absorbed[n].dequant_scale.item() == of_decode
    shown = call(capfd, "inspect", out, "--strict")
    assert shown.code == 0 and "loads 4 of 4" in shown.out
    assert not list(tmp_path.glob("*.calibration.json"))


@pytest.mark.parametrize("method", ["percentile", "mse"])
def test_other_methods_cut_off_and_never_add(
    tmp_path, capfd, numbered, gqa, texts, method
):
    out = tmp_path / "out"
    words = ["--method", method, "--percentile", "90"]
    done = call(
        capfd, "calibrate", gqa, "--output-dir", out, "--dataset", texts, *words
    )
    assert done.code == 0, done.err
    result = result_of(out)
    less = []
    for layer, roles in result["scaled"].items():
        for role, numbers in roles.items():
            ratio = numbers[0] / result["amax"][layer][role][0]
            assert ratio <= 1
            less.append(ratio < 1)
    assert all(less) if method == "percentile" else len(result["gain"]) == 3


def test_per_head_scales_are_written_with_their_shape(
    tmp_path, capfd, numbered, gqa, texts
):
    out = tmp_path / "out"
    words = ["--granularity", "head", "--copy"]
    done = call(
        capfd, "calibrate", gqa, "--output-dir", out, "--dataset", texts, *words
    )
    assert done.code == 0, done.err
    amax = result_of(out)["amax"]["layers.1"]
    with safe_open(out / "kv-scales.safetensors", "pt") as shard:
        k = shard.get_tensor("model.layers.1.self_attn.k_scale")
        q = shard.get_tensor("model.layers.1.self_attn.q_scale")
    assert (k.shape, q.shape) == ((2, 1, 1), (4, 1, 1))
    assert torch.equal(k.flatten(), torch.tensor(amax["k"]) / 448)
    assert len(set(amax["k"])) == 2
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == "attn_head"
    assert not (out / "model.safetensors").samefile(Path(gqa) / "model.safetensors")
    with engine(str(out)) as llm:
        served = attention_layers(llm)[1].impl.scales
    assert served.k.dequant_scale.tolist() == [acting(x / 448) for x in amax["k"]]
    assert served.q.dequant_scale.tolist() == [acting(x / 448) for x in amax["q"]]


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_inc_s_files_say_the_same(tmp_path, capfd, numbered, texts, kind):
    config = BUILDERS[kind]()
    path = write(tmp_path / "m", config, weights(config))
    out = tmp_path / "out"
    words = ["--export", "inc", "--scale-method", "maxabs_arbitrary"]
    words += ["--device", "gaudi2", "--dataset", texts, "--format", "json"]
    done = call(capfd, "calibrate", path, "--output-dir", out, *words)
    assert done.code == 0, done.err
    assert f"QUANT_CONFIG={out}/quantize.json vllm serve {path}" in done.json["serve"]
    result = result_of(out)["amax"]["layers.1"]
    shown = call(capfd, "inspect", out, "--device", "gaudi2", "--format", "json")
    scale = {
        row["role"]: row["dequant_scale"]
        for row in shown.json["scales"]
        if row["layer"] == "layers.1"
    }
    latent = result.get("kv_c", [0]) + result.get("k_pe", [0])
    for role in ("k", "v"):
        amax = max(result.get(role, latent))
        assert scale[role] == pytest.approx(amax / (240 / 4), rel=2**-8)


@pytest.mark.slow
def test_two_ranks_see_what_one_sees(
    tmp_path, capfd, numbered, gqa, texts, monkeypatch
):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    results = []
    for ranks in ("1", "2"):
        out = tmp_path / ranks
        words = ["--dataset", texts, "--granularity", "head", "--num-prompts", "3"]
        words += ["--tensor-parallel-size", ranks, "--method", "mse"]
        done = call(capfd, "calibrate", gqa, "--output-dir", out, *words)
        assert done.code == 0, done.err
        results.append(result_of(out)["amax"])
    for layer, roles in results[0].items():
        for role, numbers in roles.items():
            assert len(numbers) == (4 if role == "q" else 2)
            # Sums in another order move a maximum by a step of bf16 or two.
            assert results[1][layer][role] == pytest.approx(numbers, rel=2**-6)


def test_old_scales_are_replaced(tmp_path, capfd, numbered, texts):
    path = checkpoint(tmp_path / "old", "gqa", fp8_dtype_flavor="float8_e4m3fnuz")
    out = tmp_path / "out"
    done = call(capfd, "calibrate", path, "--output-dir", out, "--dataset", texts)
    assert done.code == 0, done.err
    result = result_of(out)
    assert result["made_for"] == "gaudi2"  # as the checkpoint, whatever serves
    old = kv_scales(llama_config())
    with safe_open(out / "model.safetensors", "pt") as shard:
        assert not old.keys() & set(shard.keys())
    rows = call(capfd, "inspect", out, "--format", "json").json["scales"]
    assert {row["file"] for row in rows} == {"kv-scales.safetensors"}
    assert rows[0]["amax"] == pytest.approx(result["amax"]["layers.0"]["q"][0])


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_and_goes_on(
    tmp_path, capfd, numbered, gqa, texts, monkeypatch
):
    words = ["calibrate", gqa, "--dataset", texts, "--output-dir"]
    assert call(capfd, *words, tmp_path / "whole").code == 0
    generate, calls = measure._generate, []

    def interrupted(llm, prompts):
        calls.append(len(prompts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        generate(llm, prompts)

    monkeypatch.setattr(measure, "_generate", interrupted)
    out = tmp_path / "halves"
    stopped = call(capfd, *words, out)
    assert stopped.code == 130 and not out.exists()
    state = tmp_path / "halves.calibration.json"
    assert json.loads(state.read_text())["prompts"] == calls[0]
    monkeypatch.setattr(measure, "_BATCH", 8)
    assert call(capfd, *words, out, "--resume", "--num-prompts", "39").code == 1
    assert call(capfd, *words, out, "--resume").code == 0
    assert not state.exists() and sum(calls[2:]) == 40 - calls[0]
    assert result_of(out) == result_of(tmp_path / "whole")


def test_a_failed_export_leaves_nothing(
    tmp_path, capfd, numbered, gqa, texts, monkeypatch
):
    from vllm.fp8_inc.sources import writer

    def full(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_index", full)
    out = tmp_path / "new" / "out"
    words = ["--output-dir", out, "--dataset", texts]
    assert call(capfd, "calibrate", gqa, *words).code == 130
    left = [path.name for path in out.parent.iterdir()]
    assert left == ["out.calibration.json"]


def test_a_layer_that_saw_nothing_is_an_error(
    tmp_path, capfd, numbered, gqa, texts, monkeypatch
):
    from vllm.fp8_inc.calibration.observers import Observer

    attach = Observer.attach
    monkeypatch.setattr(
        Observer,
        "attach",
        lambda self: attach(self) if ".1." not in self.layer.layer_name else None,
    )
    out = tmp_path / "out"
    done = call(capfd, "calibrate", gqa, "--output-dir", out, "--dataset", texts)
    assert done.code == 1 and "layers.1 saw no data" in done.err
    assert not out.exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--granularity", "head"], "one latent"),
        (["--num-prompts", "0"], "too small"),
        (["--percentile", "0"], "at most 100"),
        (["--resume", "--method", "percentile"], "cannot be resumed"),
        (["--output-dir", str(TINY)], "is there already"),
        ([], "no such file"),
    ],
)
def test_wrong_usage_is_told_before_the_engine_starts(tmp_path, capfd, words, said):
    done = call(
        capfd,
        *("calibrate", TINY, "--output-dir", tmp_path / "o", "--dataset", "t.txt"),
        *words,
    )
    assert done.code == 2 and said in done.err


def test_prompts_of_each_form(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [
        {"text": "1 2 3"},
        {"prompt": "4"},
        {"messages": [{"role": "user", "content": "5 6"}]},
        {"text": "7"},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert prompts_of(path, 3, 2) == [[1, 2], [4], [5, 6]]


def test_a_data_set_of_the_hub_is_read_by_its_name(tmp_path):
    """A folder has no other name; the hub is the same call."""
    rows = [{"messages": [{"content": f"{n} 2"}]} for n in range(4)]
    for split in ("train", "test"):
        path = tmp_path / "set" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))
        rows = rows[2:]
    assert prompts_of(tmp_path / "set", 3, 9) == [[0, 2], [1, 2], [2, 2]]
    assert prompts_of(f"{tmp_path}/set:test", 3, 9) == [[2, 2], [3, 2]]
    with pytest.raises(UsageError, match="nowhere: .*or give a .jsonl"):
        read_rows(f"{tmp_path}/nowhere", 3)


def prompts_of(dataset: object, number: int, longest: int) -> list[list[int]]:
    return token_ids(read_rows(str(dataset), number), Numbered(), longest)


@pytest.mark.parametrize(
    "line, said",
    [("{", "line 1 is no JSON"), ('{"a": 1}', "the keys"), ("", "no text")],
)
def test_bad_data_names_the_line(tmp_path, line, said):
    path = tmp_path / "t.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=said):
        prompts_of(path, 3, 2)
    with pytest.raises(UsageError, match="no such file"):
        prompts_of(f"{path}.txt", 3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("words", examples("calibrate"))
def test_the_examples_of_help(tmp_path, capfd, numbered, gqa, texts, words):
    (tmp_path / "t.jsonl").write_text('{"text": "1 2 3 4"}\n')
    places = {
        "MODEL": gqa,
        "OUT": tmp_path / "out",
        "texts.txt": texts,
        "texts.jsonl": tmp_path / "t.jsonl",
    }
    words = [places.get(word, word) for word in words]
    if "--dataset" not in words:  # the default is on the hub
        words += ["--dataset", texts]
    done = call(capfd, *words)
    assert done.code == 0, done.err
