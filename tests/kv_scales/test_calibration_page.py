# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The walk of docs/calibration.md works as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

from tests.kv_scales.command import call

ROOT = Path(__file__).parents[2]


def commands() -> list[list[str]]:
    """The indented command lines of the page, as words."""
    text = (ROOT / "docs" / "calibration.md").read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^    (vllm .*)$", text, re.M)]


@pytest.mark.slow
def test_the_walk(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    *calls, serve = commands()
    assert [words[2] for words in calls] == [
        *("inspect", "calibrate", "inspect", "compare", "plot", "convert", "inspect")
    ]
    said = []
    for words in calls:
        done = call(capfd, *words[2:])
        assert done.code == 0, (words, done.err)
        said.append(done.out)
    assert "to do: no scale is stored" in said[0]
    assert f"serve with: {shlex.join(serve)}" in said[1]
    assert "loads 4 of 4 layers" in said[2] and "loads 4 of 4 layers" in said[6]
    assert len(list(Path("out/figures").iterdir())) == 4
