# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""`convert` changes names and nothing else, or says what it changes."""

import json
from itertools import cycle, permutations
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.checkpoints import (
    BUILDERS,
    checkpoint,
    kv_scales,
    llama_config,
    quantization_config,
    quantize,
    weights,
    write,
)
from tests.kv_scales.command import call, examples
from vllm.fp8_inc.conversion.scales import read_scales
from vllm.fp8_inc.sources.kinds import kind_of

CHECKPOINTS = ["compressed-tensors", "modelopt", "autofp8", "quark"]
FORMS = [*CHECKPOINTS, "inc", "legacy"]


def source(folder: Path, kind: str, equal: bool = True) -> str:
    """k and v, equal or not; scales that no bf16 number is."""
    scales = {}
    for n in range(3):
        for role, value in (("k", 0.0123), ("v", 0.0123 if equal else 0.0345)):
            key = f"model.layers.{n}.self_attn.{role}_scale"
            scales[key] = torch.tensor([value + 0.007 * n])
    return checkpoint(folder, kind, scales)


def place(folder: Path, form: str) -> Path:
    return folder / ("out.json" if form == "legacy" else "out")


def opened(path: Path, form: str) -> Path:
    """What names the result as a source."""
    return path / "quantize.json" if form == "inc" else path


def numbers(path: Path) -> dict:
    """Layer -> role -> dequant scales."""
    return read_scales(str(path), kind_of(str(path)), "gaudi3").layers


@pytest.mark.parametrize(
    "kind, forms", list(zip(cycle(BUILDERS), permutations(FORMS, 2), strict=False))
)
def test_round_trips_are_exact(tmp_path, capfd, kind, forms):
    first, second = forms
    model = source(tmp_path / "model", kind)
    base = numbers(Path(model))
    path: Path = Path(model)
    for n, form in enumerate((first, second, first)):
        out = place(tmp_path / str(n), form)
        is_json = not (path / "config.json").exists()
        words = ["convert", path, out, "--to", form]
        words += ["--model", model] if is_json else []
        done = call(capfd, *words)
        assert done.code == 0, done.err
        path = opened(out, form)
        assert numbers(path) == base
        if form in CHECKPOINTS:
            shown = call(capfd, "inspect", path, "--device", "gaudi2")
            assert shown.code == 0 and "loads 3 of 3" in shown.out


@pytest.mark.parametrize("form", ["quark", "inc"])
def test_query_and_prob_travel(tmp_path, capfd, form):
    scales = kv_scales(llama_config())
    for n in range(3):
        key = f"model.layers.{n}.self_attn.prob_output_scale"
        scales[key] = torch.tensor(0.002 + n / 1000)
    model = checkpoint(tmp_path / "m", "gqa", scales)
    out = tmp_path / "out"
    assert call(capfd, "convert", model, out, "--to", form).code == 0
    assert numbers(opened(out, form)) == numbers(Path(model))


@pytest.mark.parametrize(
    "form, lost",
    [
        ("modelopt", "the scales of q"),
        ("autofp8", "the scales of q"),
        ("legacy", "unequal k and v"),
    ],
)
def test_a_loss_must_be_asked_for(tmp_path, capfd, form, lost):
    model = checkpoint(tmp_path / "m", "gqa")
    out = place(tmp_path, form)
    refused = call(capfd, "convert", model, out, "--to", form)
    assert refused.code == 1 and lost in refused.err and not out.exists()
    done = call(capfd, "convert", model, out, "--to", form, "--lossy")
    assert done.code == 0 and f"lost: {lost}" in done.out
    for n, roles in enumerate(numbers(out).values()):
        v = torch.tensor(0.031 + 0.007 * n).item()
        k = v if form == "legacy" else torch.tensor(0.011 + 0.005 * n).item()
        assert roles == {"k": (k,), "v": (v,)}


def test_the_latent_of_quark_is_fused(tmp_path, capfd):
    model = source(tmp_path / "m", "mla", equal=False)
    out = tmp_path / "out"
    assert call(capfd, "convert", model, out, "--to", "quark").code == 1
    assert call(capfd, "convert", model, out, "--to", "quark", "--lossy").code == 0
    with safe_open(out / "kv-scales.safetensors", "pt") as shard:
        key = "model.layers.2.self_attn.kv_b_proj.output_scale"
        assert shard.get_tensor(key) == torch.tensor(0.0345 + 0.014)
        assert len(shard.keys()) == 3


@pytest.mark.parametrize("form", FORMS)
def test_the_device_changes_scales_and_flavour_together(tmp_path, capfd, form):
    model = source(tmp_path / "m", "gqa")
    out = place(tmp_path, form)
    done = call(capfd, "convert", model, out, "--to", form, "--device", "gaudi2")
    assert done.code == 0 and "gaudi3 -> gaudi2" in done.out
    found = read_scales(
        str(opened(out, form)), kind_of(str(opened(out, form))), "gaudi2"
    )
    assert found.made_for == "gaudi2"
    k = found.layers["layers.1"]["k"][0]
    assert k == pytest.approx(0.0193 * 448 / 240, rel=1e-6)


def test_weights_keep_their_flavour(tmp_path, capfd):
    config = llama_config(quantization_config=quantization_config())
    tensors = quantize(weights(config)) | kv_scales(config)
    model = write(tmp_path / "m", config, tensors)
    words = ["convert", model, tmp_path / "out", "--to", "quark"]
    refused = call(capfd, *words, "--device", "gaudi2")
    assert refused.code == 2 and "FP8 weights" in refused.err
    assert call(capfd, *words).code == 0
    new = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert new["quant_method"] == "compressed-tensors"
    assert new["config_groups"] == config["quantization_config"]["config_groups"]
    assert "kv_cache_scheme" not in new and new["export"]["kv_cache_group"]


def test_a_dry_run_shows_and_writes_nothing(tmp_path, capfd):
    model = source(tmp_path / "m", "gqa", equal=False)
    out = tmp_path / "out"
    words = ["convert", model, out, "--to", "modelopt", "--dry-run", "--format", "json"]
    done = call(capfd, *words)
    assert done.code == 0 and not out.exists()
    row = done.json["scales"][1]
    assert (row["from"], row["to"]) == (
        "model.layers.0.self_attn.v_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
    )
    assert row["dequant_scale"] == row["dequant_scale_there"]
    assert {row["change"] for row in done.json["scales"]} == {"same"}


@pytest.mark.parametrize("bad", [0.0, float("nan"), None])
def test_all_is_validated_before_a_byte_is_written(tmp_path, capfd, bad):
    scales = kv_scales(llama_config())
    key = "model.layers.2.self_attn.v_scale"
    if bad is None:
        del scales[key]
    else:
        scales[key] = torch.tensor([bad])
    model = checkpoint(tmp_path / "m", "gqa", scales)
    done = call(capfd, "convert", model, tmp_path / "o", "--to", "quark")
    assert done.code == 1 and key in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["{m}", "{o}", "--to", "quark", "--from", "legacy"], "is not legacy"),
        (["{m}", "{m}", "--to", "quark"], "is there already"),
        (["{m}", "{o}", "--to", "quark", "--model", "{m}"], "--model goes with"),
        (["nowhere", "{o}", "--to", "quark"], "no local folder"),
    ],
)
def test_wrong_usage(tmp_path, capfd, words, said):
    model = source(tmp_path / "m", "gqa")
    words = [word.format(m=model, o=tmp_path / "o") for word in words]
    done = call(capfd, "convert", *words)
    assert done.code == 2 and said in done.err


def test_from_is_checked(tmp_path, capfd):
    model = source(tmp_path / "m", "gqa")
    words = ["convert", model, tmp_path / "o", "--to", "quark", "--from"]
    assert call(capfd, *words, "autofp8").code == 0
    assert (
        "no name of modelopt"
        in call(capfd, *words[:2], tmp_path / "p", *words[3:], "modelopt").err
    )


@pytest.mark.parametrize("words", examples("convert"))
def test_the_examples_of_help(tmp_path, capfd, words):
    model = source(tmp_path / "m", "gqa")
    scales = tmp_path / "s.json"
    assert call(capfd, "convert", model, scales, "--to", "legacy").code == 0
    places = {
        "MODEL": model,
        "OUT": tmp_path / "out",
        "scales.json": scales,
        "out.json": tmp_path / "out.json",
    }
    done = call(capfd, *(places.get(word, word) for word in words))
    assert done.code == 0, done.err
