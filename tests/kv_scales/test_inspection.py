# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""`inspect` shows every scale, and says what a server says."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import (
    BUILDERS,
    checkpoint,
    deepseek_config,
    kv_scales,
    llama_config,
    weights,
    write,
)
from tests.engines import engine, loaded
from tests.kv_scales.command import call, examples
from vllm.fp8_inc.sources.folder import INDEX, Folder
from vllm.fp8_inc.verdict import verdict

LAYER = "model.layers.1.self_attn"
INC = Path(__file__).parents[1] / "sources" / "inc" / "samples" / "tiny_mla_g3_inc310"


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_scale_is_shown_with_its_amax(tmp_path, capfd, kind):
    path = checkpoint(tmp_path, kind, fp8_dtype_flavor="float8_e4m3fnuz")
    shown = call(capfd, "inspect", path, "--format", "json")
    assert shown.code == 0
    scales = kv_scales(BUILDERS[kind]())
    assert len(shown.json["scales"]) == len(scales)
    for row in shown.json["scales"]:
        assert row["dequant_scale"] == scales[row["key"]].item()
        assert row["amax"] == pytest.approx(240 * row["dequant_scale"])
        assert row["key"].endswith(f"{row['layer']}.self_attn.{row['role']}_scale")
        assert (row["file"], row["status"]) == ("model.safetensors", "ok")
    devices = shown.json["devices"]
    assert [devices[d]["factor"] for d in devices] == [1, 240 / 448]
    assert [devices[d]["loaded"] for d in devices] == [3, 3]


def test_csv_has_the_numbers_of_json(tmp_path, capfd):
    path = checkpoint(tmp_path, "gqa")
    rows = call(capfd, "inspect", path, "--format", "json").json["scales"]
    text = call(capfd, "inspect", path, "--format", "csv").out
    shown = list(csv.DictReader(io.StringIO(text)))
    assert [float(r["dequant_scale"]) for r in shown] == [
        r["dequant_scale"] for r in rows
    ]


def test_the_table_is_plain_where_no_terminal_is(tmp_path, capfd):
    out = call(capfd, "inspect", checkpoint(tmp_path, "mla")).out
    assert out.isascii() and "\x1b" not in out
    assert re.search(r"^layers\.1 +k +0\.016 +7\.168 +tensor +ok +model", out, re.M)
    assert "gaudi2: loads 3 of 3 layers" in out


@pytest.mark.parametrize("kind, device", [("mla", "gaudi2"), ("gqa", "gaudi3")])
def test_the_scales_that_act_are_the_engine_s(tmp_path, kind, device):
    path = checkpoint(tmp_path, kind)
    options = {"additional_config": {"fp8_inc": {"device": device}}}
    with engine(path, **options) as llm:
        served = loaded(llm)
    scales = verdict(Folder.open(path), device).scales.values()
    assert served == [
        {role: getattr(s, role).dequant_scale.item() for role in ("k", "v", "q")}
        for s in scales
    ]


def broken(name: str, scales: dict[str, torch.Tensor]) -> None:
    """Breaks the scales of a checkpoint in one of the ways that stop a server."""
    if name == "zero":
        scales[f"{LAYER}.k_scale"] = torch.zeros(1)
    elif name == "missing":
        del scales[f"{LAYER}.v_scale"]
    elif name == "foreign":
        scales["model.layers.9.self_attn.k_scale"] = torch.tensor([0.5])
    elif name == "contradiction":
        scales[f"{LAYER}.k_proj.k_scale"] = torch.tensor([0.25])
    elif name == "zero-point":
        scales[f"{LAYER}.k_zero_point"] = torch.ones(1)


@pytest.mark.parametrize(
    "name", ["zero", "missing", "foreign", "contradiction", "zero-point", "flavour"]
)
def test_the_error_is_the_engine_s(tmp_path, capfd, name):
    scales = kv_scales(llama_config())
    broken(name, scales)
    changes = {"fp8_dtype_flavor": "e5m2"} if name == "flavour" else {}
    path = checkpoint(tmp_path, "gqa", scales, **changes)
    shown = call(capfd, "inspect", path, "--device", "gaudi3", "--format", "json")
    assert shown.code == 1
    with pytest.raises(ValueError) as error, engine(path):
        pass
    # What is found while the configuration is completed, pydantic wraps.
    assert shown.json["devices"]["gaudi3"]["error"] in str(error.value)


def test_a_wrong_scale_does_not_hide_the_others(tmp_path, capfd):
    scales = kv_scales(llama_config())
    scales[f"{LAYER}.k_scale"] = torch.tensor([float("nan")])
    shown = call(
        capfd, "inspect", checkpoint(tmp_path, "gqa", scales), "--format", "json"
    )
    status = {(r["layer"], r["role"]): r["status"] for r in shown.json["scales"]}
    assert status["layers.0", "k"] == status["layers.1", "v"] == "ok"
    wrong = [r for r in shown.json["scales"] if r["status"].startswith("error")]
    assert [r["key"] for r in wrong] == [f"{LAYER}.k_scale"]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"k": 1.0, "v": 1.0}, "exactly 1.0 in 3 of 3"),
        ({"k": 0.5, "v": 0.25}, "all 3 layers have the same"),
    ],
)
def test_odd_scales_are_a_finding_when_strict(tmp_path, capfd, change, said):
    scales = {
        key: torch.tensor([change[key[-7]]])
        for key in kv_scales(llama_config())
        if key[-7] in change
    }
    path = checkpoint(tmp_path, "gqa", scales)
    assert call(capfd, "inspect", path).code == 0
    strict = call(capfd, "inspect", path, "--strict")
    assert strict.code == 1 and said in strict.out


def test_an_outlier_is_named(tmp_path, capfd):
    config = llama_config(num_hidden_layers=6)
    scales = kv_scales(config)
    scales["model.layers.4.self_attn.v_scale"] = torch.tensor([9.0])
    path = write(tmp_path, config, weights(config) | scales)
    out = call(capfd, "inspect", path).out
    assert "suspicious: v: 1 outliers" in out and "layers.4 9" in out
    assert "suspicious: k" not in out


@pytest.mark.parametrize(
    "name, said",
    [("k_scale", "nothing shows that k_pe"), ("kv_b_proj.output_scale", "k_pe, which")],
)
def test_an_uncovered_k_pe_is_suspected(tmp_path, capfd, name, said):
    scales = {}
    for n in range(3):
        for key in {name, name.replace("k_scale", "v_scale")}:
            scales[f"model.layers.{n}.self_attn.{key}"] = torch.tensor(0.1 + n)
    out = call(capfd, "inspect", checkpoint(tmp_path, "mla", scales)).out
    assert said in out


def test_auto_round_s_last_batch_is_pointed_out(tmp_path, capfd):
    path = checkpoint(tmp_path, "gqa", provider="auto-round")
    out = call(capfd, "inspect", path).out
    assert "of its last calibration batch only; their spread over layers is 1.91" in out


def test_nothing_stored_is_said_with_the_way_out(tmp_path, capfd):
    config = llama_config()
    path = write(tmp_path, config, weights(config))
    shown = call(capfd, "inspect", path)
    assert shown.code == 0 and "vllm kv-scales calibrate" in shown.out
    assert "loads 0 of 3 layers" in shown.out
    assert call(capfd, "inspect", path, "--strict").code == 1


def legacy(path: Path, layers: int = 3) -> Path:
    numbers = {str(n): 0.125 * (n + 1) for n in range(layers)}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": numbers}}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    return path


def test_a_legacy_json_alone_and_for_a_model(tmp_path, capfd):
    path = legacy(tmp_path / "s.json")
    alone = call(capfd, "inspect", path, "--format", "json")
    assert alone.code == 0
    assert [r["dequant_scale"] for r in alone.json["scales"][::2]] == [
        0.125,
        0.25,
        0.375,
    ]
    config = llama_config(num_hidden_layers=4)
    model = write(tmp_path / "model", config, weights(config))
    shown = call(capfd, "inspect", path, "--model", model)
    assert shown.code == 1
    assert "kv_cache.scaling_factor.*.3 missing" in shown.out


def inc(folder: Path, **changes: object) -> Path:
    """A quant-config for real files of INC 3.10."""
    stats = INC / "inc_output"
    content = {"mode": "QUANTIZE", "dump_stats_path": str(stats), **changes}
    path = folder / "quantize.json"
    path.write_text(json.dumps(content))
    return path


def test_inc_s_files(tmp_path, capfd):
    config = inc(tmp_path, scale_method="maxabs_hw")
    shown = call(capfd, "inspect", config, "--format", "json")
    assert shown.code == 0, shown.err
    first = {r["role"]: r for r in shown.json["scales"] if r["layer"] == "layers.0"}
    assert first["k"]["dequant_scale"] == first["v"]["dequant_scale"] == 0.0625
    assert first["k"]["key"].endswith("mla_attn.mla_attn.impl.latent_cache_k")
    assert first["k"]["file"] == "inc_output_hooks_maxabs_MAXABS_HW.json"
    model = checkpoint(tmp_path / "m", "mla")
    out = call(capfd, "inspect", config, "--model", model).out
    assert re.search(r"gaudi3: loads \d of 3 layers", out)


def test_inc_s_errors_and_lists(tmp_path, capfd):
    wrong = inc(tmp_path, scale_method="maxabs_pow3")
    shown = call(capfd, "inspect", wrong)
    assert shown.code == 1 and "maxabs_pow3" in shown.out
    names = {"types": [], "names": [r"layers\.0\."]}
    out = call(capfd, "inspect", inc(tmp_path, blocklist=names)).out
    assert "in bf16 by INC's lists: layers.0" in out
    assert re.search(r"^layers\.0 +k +- +- +- +bf16", out, re.M)


def test_only_shards_of_the_index_count(tmp_path, capfd):
    path = Path(checkpoint(tmp_path, "gqa"))
    index = {"weight_map": {"lm_head.weight": "model.safetensors"}}
    (path / INDEX).write_text(json.dumps(index))
    save_file(
        {"model.layers.0.self_attn.k_scale": torch.ones(1)}, path / "x.safetensors"
    )
    assert "loads 3 of 3" in call(capfd, "inspect", path).out


def test_layers_without_attention_are_not_expected():
    """As in models that mix attention with state-space layers."""
    folder = Folder(Path("m"), {"text_config": {"num_hidden_layers": 6}})
    keys = [
        "model.language_model.layers.2.self_attn.qkv_proj.weight",
        "model.language_model.layers.4.self_attn.k_proj.weight_packed",
        "model.language_model.layers.3.mixer.in_proj.weight",
        "model.layers.6.self_attn.k_proj.weight",
        "vision_tower.layers.1.self_attn.k_proj.weight",
    ]
    folder.__dict__["keys"] = {Path("a"): keys}
    assert folder.attention_layers == ["layers.2", "layers.4"]


@pytest.mark.parametrize("words", [["nowhere"], ["{path}", "--model", "x"]])
def test_wrong_usage_is_2(tmp_path, capfd, words):
    words = [word.format(path=tmp_path) for word in words]
    shown = call(capfd, "inspect", *words)
    assert (shown.code, shown.out) == (2, "") and shown.err.startswith("error: ")


def test_pickled_weights_are_refused(tmp_path, capfd):
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    shown = call(capfd, "inspect", tmp_path)
    assert shown.code == 1 and "Convert the weights to safetensors" in shown.err


def sparse_shard(path: Path, keys: list[str], size: int) -> None:
    """A shard of ``size`` bytes a tensor that takes no room on the disk."""
    header = {
        key: {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [n * size, (n + 1) * size],
        }
        for n, key in enumerate(keys)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + len(keys) * size)


def memory(name: str) -> int:
    """A line of /proc/self/status in MiB."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", text)[1]) // 1024


def test_a_large_checkpoint_takes_little_memory(tmp_path, capfd):
    """700 GB, 90,000 tensors in 150 shards, as DeepSeek-R1 has them."""
    config = deepseek_config(num_hidden_layers=61)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for shard in range(150):
        experts = [f"model.layers.{shard % 61}.mlp.{shard}.{n}" for n in range(600)]
        attention = [f"model.layers.{shard % 61}.self_attn.kv_b_proj.weight"]
        keys = attention * (shard < 61) + experts
        sparse_shard(tmp_path / f"m-{shard}.safetensors", keys, 8_000_000)
    save_file(kv_scales(config), tmp_path / "scales.safetensors")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    shown = call(capfd, "inspect", tmp_path, "--device", "gaudi2")
    assert "loads 61 of 61" in shown.out
    assert memory("VmHWM") - before < 300


@pytest.mark.parametrize("words", examples("inspect"))
def test_the_examples_of_help(tmp_path, capfd, words):
    model = checkpoint(tmp_path, "gqa")
    places = {
        "MODEL": model,
        "scales.json": legacy(tmp_path / "s.json"),
        "quantize.json": inc(tmp_path),
    }
    assert call(capfd, *(places.get(word, word) for word in words)).code == 0


def test_help_shows_the_options(capfd):
    out = call(capfd, "inspect", "--help").out
    assert "--strict" in out and "Exit code" in out


@pytest.mark.parametrize(
    "kind, fp8, tokens",
    [("mla", 3 * 96, 3_728_270), ("gqa", 3 * 2 * 2 * 32, 2_796_202)],
)
def test_capacity(tmp_path, capfd, kind, fp8, tokens):
    out = call(capfd, "inspect", checkpoint(tmp_path, kind), "--capacity").out
    assert f"fp8_inc: {fp8:,} bytes a token, {tokens:,} tokens a GiB" in out
