# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A full disk, a place that cannot be written, an interrupt: nothing half-written."""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import checkpoint, llama_config, weights, write
from tests.faults.table import fails, files_in
from tests.kv_scales.command import call
from vllm.fp8_inc import report
from vllm.fp8_inc.comparison import run as comparison
from vllm.fp8_inc.conversion import write as conversion
from vllm.fp8_inc.sources import writer
from vllm.fp8_inc.whole_folder import check_writable, new_file, new_folder

# Nobody, not even root, makes a file there.
NOWHERE = "/proc/nowhere"


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file grows beyond ``room`` bytes: the error is another, its path the same."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def source(folder: Path) -> str:
    return checkpoint(folder / "model", "gqa")


def legacy(folder: Path) -> Path:
    numbers = {str(n): 0.5 for n in range(200)}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": numbers}}
    (folder / "scales.json").write_text(json.dumps({"kv_cache": cache}))
    return folder / "scales.json"


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("1 2 3\n4 5 6\n")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["--to", "quark", "--copy"],
        ["--to", "quark"],
        ["--to", "legacy"],
        ["--to", "inc"],
    ],
    ids=" ".join,
)
def test_a_full_disk_leaves_nothing(tmp_path, capfd, words):
    out = tmp_path / "out"
    # A line of stderr has room, each format's largest file has not.
    model = source(tmp_path) if "quark" in words else legacy(tmp_path)
    with full_disk(2000):
        parts = (f"{out} cannot be written", "File too large", "make room")
        fails(capfd, tmp_path, "convert", model, out, *words, parts=parts)
    assert call(capfd, "convert", model, out, *words).code == 0


@pytest.mark.parametrize("to", ["quark", "legacy", "inc"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, capfd, to):
    words = ("convert", source(tmp_path), f"{NOWHERE}/out", "--to", to, "--lossy")
    fails(capfd, tmp_path, *words, parts=(f"{NOWHERE}/out cannot be written",))


def test_a_file_in_the_place_of_a_folder(tmp_path, capfd, texts):
    out = texts / "out"
    words = ("convert", source(tmp_path), out, "--to", "quark", "--lossy")
    fails(capfd, tmp_path, *words, parts=(f"{out} cannot be written", "File exists"))


@pytest.fixture
def no_engine(monkeypatch):
    """Fails the test where an engine starts."""
    import vllm

    def start(*_: object, **__: object) -> None:
        pytest.fail("an engine was started")

    monkeypatch.setattr(vllm.LLM, "__init__", start)


EARLY = {
    "calibrate, output": (
        ["calibrate", "{m}", "--dataset", "{t}", "--output-dir", f"{NOWHERE}/out"],
        (f"{NOWHERE}/out", "cannot be written"),
    ),
    "calibrate, no data": (
        ["calibrate", "{m}", "--dataset", "none.txt", "--output-dir", "{o}"],
        ("none.txt", "no such file"),
    ),
    "calibrate, bad data": (
        ["calibrate", "{m}", "--dataset", "{j}", "--output-dir", "{o}"],
        ("bad.jsonl, line 2", "keys ['a']"),
    ),
    "calibrate, deep data": (
        ["calibrate", "{m}", "--dataset", "{d}", "--output-dir", "{o}"],
        ("deep.jsonl, line 1", "nested too deeply"),
    ),
    "calibrate, no state": (
        ["calibrate", "{m}", "--dataset", "{t}", "--output-dir", "{o}", "--resume"],
        ("--resume", "calibration.json", "start anew"),
    ),
    "calibrate, broken shard": (
        ["calibrate", "{b}", "--dataset", "{t}", "--output-dir", "{o}"],
        ("model.safetensors cannot be read", "again"),
    ),
    "compare, broken shard": (
        ["compare", "{b}", "--text", "{t}"],
        ("model.safetensors cannot be read", "again"),
    ),
    "compare, output": (
        ["compare", "{m}", "--text", "{t}", "--output-json", f"{NOWHERE}/o.json"],
        (f"{NOWHERE}/o.json", "cannot be written"),
    ),
    "compare, work": (
        ["compare", "{m}", "--text", "{t}", "--work-dir", NOWHERE],
        (NOWHERE, "cannot be written"),
    ),
    "plot, figures": (
        ["plot", "{m}", "--fig-dir", NOWHERE],
        (NOWHERE, "cannot be written"),
    ),
}


@pytest.mark.parametrize("case", EARLY)
def test_hours_of_work_do_not_come_first(tmp_path, capfd, texts, no_engine, case):
    words, parts = EARLY[case]
    model, broken = source(tmp_path), source(tmp_path / "broken")
    shard = Path(broken) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "bad.jsonl").write_text('{"text": "1"}\n{"a": 1}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    places = {"m": model, "b": broken, "t": texts, "o": tmp_path / "out"}
    places |= {"j": tmp_path / "bad.jsonl", "d": tmp_path / "deep.jsonl"}
    words = [word.format(**places) for word in words]
    code = 2 if "no such file" in parts else 1
    fails(capfd, tmp_path, *words, parts=parts, code=code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_writing_leaves_nothing(tmp_path, capfd, monkeypatch, number):
    """SIGTERM is what `docker stop` and schedulers send."""
    monkeypatch.setattr(writer, "_write_index", lambda *_: os.kill(os.getpid(), number))
    model = source(tmp_path)
    before, handler = files_in(tmp_path), signal.getsignal(signal.SIGTERM)
    # Jobs that a shell starts in the background ignore SIGINT.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = call(
            capfd, "convert", model, tmp_path / "out", "--to", "quark", "--lossy"
        )
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert (done.code, done.err.splitlines()[-1]) == (128 + number, "interrupted")
    assert files_in(tmp_path) == before
    assert signal.getsignal(signal.SIGTERM) == handler


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    dead, alive = (
        tmp_path / ".out.999999999.part",
        tmp_path / f".out.{os.getppid()}.part",
    )
    other = tmp_path / ".other.999999999.part"
    for folder in (dead, alive, other):
        folder.mkdir()
        (folder / "half").write_text("half")
    with new_folder(tmp_path / "out") as part:
        (part / "whole").write_text("whole")
    assert not dead.exists() and alive.exists() and other.exists()


def test_a_file_is_old_or_new(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    with (
        full_disk(2),
        pytest.raises(ValueError, match=f"{path} cannot be written: File too large"),
        new_file(path) as part,
    ):
        part.write_text("newer")
    assert path.read_text() == "old" and len(files_in(tmp_path)) == 1
    with pytest.raises(ZeroDivisionError), new_file(path) as part:
        part.write_text(str(1 // 0))
    assert path.read_text() == "old" and len(files_in(tmp_path)) == 1
    check_writable(path)
    assert path.read_text() == "old" and len(files_in(tmp_path)) == 1


def test_an_error_of_the_system_is_a_line(capsys):
    def run(args):
        raise PermissionError(13, "Permission denied", "x.json")

    from types import SimpleNamespace

    from vllm.fp8_inc.report import run_command

    report.broken = run  # found by name, as commands are
    try:
        code = run_command(SimpleNamespace(run=f"{report.__name__}:broken"))
    finally:
        del report.broken
    assert code == 1
    assert capsys.readouterr().err.startswith("error: [Errno 13] Permission denied")


def test_an_output_json_is_whole(tmp_path, monkeypatch):
    shown = report.Report("rows", report.Table(("x",), [(float("nan"),)]))
    with pytest.raises(ValueError, match="JSON compliant"):
        comparison._write_json(tmp_path / "o.json", shown)
    assert not files_in(tmp_path)


def test_a_legacy_json_is_whole(tmp_path, capfd, monkeypatch):
    model = source(tmp_path)

    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    before = files_in(tmp_path)
    monkeypatch.setattr(conversion, "json", type("J", (), {"dumps": interrupted}))
    words = ("convert", model, tmp_path / "s.json", "--to", "legacy", "--lossy")
    assert call(capfd, *words).code == 130
    assert files_in(tmp_path) == before


def test_a_state_of_another_kind_is_named(tmp_path, capfd, texts, no_engine):
    from vllm.fp8_inc.calibration.state import State

    config = llama_config()
    write(tmp_path / "m", config, weights(config))
    path = tmp_path / "out.calibration.json"
    for content, said in (
        ("{", "start anew"),
        ("[]", "start anew"),
        (json.dumps({"fingerprint": "other"}), "another model"),
        (json.dumps({"fingerprint": "x", "odd": 1}), "odd"),
        ("[" * 100_000, "start anew"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            State.load(path, "x")
