# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""`plot` draws the numbers it was given, beside each other."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoints import checkpoint, kv_scales, llama_config
from tests.kv_scales.command import call, examples
from tests.kv_scales.test_inspection import inc, legacy
from vllm.fp8_inc.plotting.figures import draw_error, draw_range, draw_scales
from vllm.fp8_inc.plotting.source import read_source

RESULT = {
    "amax": {
        f"layers.{n}": {"k": [3.0 + n], "v": [9.0, 8.0], "q": [1.0]} for n in range(3)
    },
    "error": {f"layers.{n}": {"k": [1e-3 * (n + 1)]} for n in range(3)},
}


@pytest.fixture
def model(tmp_path) -> str:
    return checkpoint(tmp_path / "m", "gqa", fp8_dtype_flavor="float8_e4m3fnuz")


def lines(axes) -> list[list[float]]:
    return [list(line.get_ydata()) for line in axes.get_lines()]


def test_two_sources_are_overlaid(tmp_path, model):
    sources = [read_source(p, "gaudi3") for p in (model, legacy(tmp_path / "s.json"))]
    figure = draw_scales(sources)
    k, v, q = figure.axes
    scales = kv_scales(llama_config())
    for axes, role in ((k, "k"), (v, "v"), (q, "q")):
        key = "model.layers.{}.self_attn." + f"{role}_scale"
        assert lines(axes)[0] == [scales[key.format(n)].item() for n in range(3)]
    assert lines(k)[1] == lines(v)[1] == [0.125, 0.25, 0.375]
    assert len(lines(q)) == 1
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["m (gaudi2, 240)", "s (gaudi3, 448)"]
    first, second = k.get_lines()
    for look in ("get_color", "get_marker", "get_linestyle"):
        assert getattr(first, look)() != getattr(second, look)()


def test_the_range_is_the_format_s(model):
    figure = draw_range([read_source(model, "gaudi3")])
    normal, subnormal = figure.axes[0].containers
    scale = torch.tensor(0.011).item()
    bar = normal.patches[0]
    assert bar.get_y() == pytest.approx(scale * 2**-6)
    assert bar.get_y() + bar.get_height() == pytest.approx(scale * 240)
    bar = subnormal.patches[0]
    assert bar.get_y() == pytest.approx(scale * 2**-9)
    assert bar.get_y() + bar.get_height() == pytest.approx(scale * 2**-6)
    assert bar.get_hatch() and not normal.patches[0].get_hatch()


def test_a_calibration_s_measurements_are_shown(model):
    (Path(model) / "kv-scales-calibration.json").write_text(json.dumps(RESULT))
    source = read_source(model, "gaudi3")
    marks = draw_range([source]).axes[0].get_lines()[0]
    assert list(marks.get_ydata()) == [3.0, 4.0, 5.0]
    assert "measured" in marks.get_label()
    assert lines(draw_error([source]).axes[0]) == [[1e-3, 2e-3, 3e-3]]


def test_files_are_written_whole_and_the_same_each_time(tmp_path, capfd, model):
    (Path(model) / "kv-scales-calibration.json").write_text(json.dumps(RESULT))
    contents = []
    for n in range(2):
        folder = tmp_path / str(n)
        done = call(capfd, "plot", model, "--fig-dir", folder, "--format", "json")
        assert done.code == 0, done.err
        names = [Path(row["file"]).name for row in done.json["figures"]]
        assert sorted(names) == sorted(path.name for path in folder.iterdir())
        assert len(names) == 6
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    for name, content in contents[0].items():
        start = b"\x89PNG" if name.endswith("png") else b"<?xml"
        assert content.startswith(start)


def test_a_bad_source_draws_nothing(tmp_path, capfd):
    scales = kv_scales(llama_config())
    scales["model.layers.0.self_attn.k_scale"] = torch.zeros(1)
    path = checkpoint(tmp_path / "bad", "gqa", scales)
    done = call(capfd, "plot", path, "--fig-dir", tmp_path / "f")
    assert done.code == 1 and not (tmp_path / "f").exists()


def test_mla_has_one_panel_for_the_latent(tmp_path):
    source = read_source(checkpoint(tmp_path / "m", "mla"), "gaudi3")
    assert list(source.scales["latent"].values()) == [
        torch.tensor(0.031 + 0.007 * n).item() for n in range(3)
    ]
    assert [axes.get_title(loc="left") for axes in draw_scales([source]).axes] == [
        "latent (kv_c, k_pe)",
        "Q",
    ]


def test_inc_s_files(tmp_path):
    source = read_source(str(inc(tmp_path, scale_method="maxabs_hw")), "gaudi3")
    assert source.scales["k"][0] == 0.0625


@pytest.mark.parametrize("words", examples("plot"))
def test_the_examples_of_help(tmp_path, capfd, model, words):
    places = {
        "MODEL": model,
        "scales.json": str(legacy(tmp_path / "scales.json")),
        "figures": str(tmp_path / "figures"),
    }
    done = call(capfd, *(places.get(word, word) for word in words))
    assert done.code == 0, done.err
    assert (tmp_path / "figures").exists() == ("--dry-run" not in words)
