# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""`vllm kv-scales` as a user starts it: data on stdout, logs on stderr."""

import io
import json
import subprocess
import sys

import pytest

from tests.checkpoints import checkpoint
from vllm.fp8_inc.report import Report, Table

MAIN = "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main"


def vllm(*words: str) -> subprocess.CompletedProcess:
    """The console script ``vllm``."""
    command = [sys.executable, "-c", f"{MAIN}; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_stdout_is_json_and_nothing_else(tmp_path):
    done = vllm("kv-scales", "inspect", checkpoint(tmp_path, "mla"), "--format=json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attention"] == "MLA"
    assert "INFO" in done.stderr  # what vLLM logs while it is imported


@pytest.mark.slow
def test_the_command_is_listed_and_wrong_usage_is_2(tmp_path):
    assert "kv-scales" in vllm("--help").stdout
    done = vllm("kv-scales", "inspect", str(tmp_path), "--nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nothing" in done.stderr


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    report = Report("rows", Table(("name", "size"), [("a", 1.5)]), lines=["done"])
    terminal, plain = Terminal(), io.StringIO()
    report.write("table", terminal)
    report.write("table", plain)
    assert "─" in terminal.getvalue() and plain.getvalue().isascii()
    assert plain.getvalue().split() == ["name", "size", "a", "1.5", "done"]


def test_json_has_no_nan():
    report = Report("rows", Table(("x",), [(float("nan"),)]))
    with pytest.raises(ValueError):
        report.write("json", io.StringIO())
