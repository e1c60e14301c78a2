# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Ctrl-C and kill -9 of the real commands, and servers that must not start."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.checkpoints import checkpoint
from tests.faults.shards import cut
from tests.faults.table import files_in

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v2"
MAIN = "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main"
_SECONDS = 120


def started(*words: object, **environment: str) -> subprocess.Popen:
    """``vllm`` with these words, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{MAIN}; main()", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    )


def members(process: subprocess.Popen) -> list[psutil.Process]:
    """What still runs in the session of ``process``."""
    found = []
    for other in psutil.process_iter():
        try:
            session = os.getsid(other.pid)
        except OSError:
            continue
        if session == process.pid and other.status() != psutil.STATUS_ZOMBIE:
            found.append(other)
    return found


def no_orphan(process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while members(process) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not members(process)


def until(process: subprocess.Popen, said: str) -> str:
    """Reads what it says until it has said ``said``."""
    text = ""
    for line in process.stdout:
        text += line
        if said in line:
            return text
    raise AssertionError(f"it never said {said!r}:\n{text}")


@pytest.fixture
def texts(tmp_path) -> Path:
    """More than is read before a signal comes."""
    data = (TINY.parent / "calibration-texts.jsonl").read_text()
    path = tmp_path / "texts.jsonl"
    path.write_text(data * 100)
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("ranks", [1, 2])
def test_calibrate_is_stopped(tmp_path, texts, number, ranks):
    """With two ranks its workers are processes, which must end too."""
    out = tmp_path / "out"
    words = ["--output-dir", out, "--dataset", texts, "--num-prompts", 5000]
    words += ["--tensor-parallel-size", ranks]
    nobind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    process = started("kv-scales", "calibrate", TINY, *words, **nobind)
    before = until(process, "calibrate:")
    process.send_signal(number)
    text, _ = process.communicate(timeout=_SECONDS)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected, before + text
    no_orphan(process)
    assert not out.exists()
    left = set(files_in(tmp_path)) - {"texts.jsonl", "out.calibration.json"}
    assert not left
    if number != signal.SIGKILL:
        assert "--resume goes on" in text


SLOW_INDEX = """
import sys, time
from vllm.fp8_inc.sources import writer
write = writer._write_index
def slow(*words):
    print("half", flush=True)
    time.sleep(60)
    write(*words)
writer._write_index = slow
sys.argv[:] = ["vllm", *sys.argv[1:]]
from vllm.entrypoints.cli.main import main
main()
"""


def test_convert_is_killed_and_run_again(tmp_path):
    model = checkpoint(tmp_path / "model", "gqa")
    words = ["kv-scales", "convert", model, str(tmp_path / "out"), "--to", "quark"]
    words.append("--lossy")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_INDEX, *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(process, "half")
    process.kill()
    process.wait(_SECONDS)
    assert not (tmp_path / "out").exists()
    done = started(*words)
    text, _ = done.communicate(timeout=_SECONDS)
    assert done.returncode == 0, text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


SERVER = ["-m", "vllm.entrypoints.openai.api_server", "--port", "0", "--enforce-eager"]


def bad_shard(folder: Path) -> dict[str, str]:
    cut(-1)(folder)
    return {}


def maybe(folder: Path) -> dict[str, str]:
    return {"VLLM_SCALE_ADJUSTMENT": "maybe"}


def no_quant_config(folder: Path) -> dict[str, str]:
    return {"QUANT_CONFIG": str(folder / "nowhere.json")}


def four_bits(folder: Path) -> dict[str, str]:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"]["num_bits"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    return {}


@pytest.mark.parametrize(
    "build, said",
    [
        (bad_shard, "model.safetensors cannot be read"),
        (maybe, "VLLM_SCALE_ADJUSTMENT='maybe'"),
        (no_quant_config, "nowhere.json cannot be read"),
        (four_bits, "num_bits is 4"),
    ],
)
def test_a_server_that_must_not_start(tmp_path, build, said):
    """The error comes before a process of an engine is started."""
    path = checkpoint(tmp_path, "mla")
    environment = os.environ | build(tmp_path)
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(
        [sys.executable, *SERVER, "--model", path, "--kv-cache-dtype", "fp8_inc"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode not in (0, None)
    assert said in done.stderr
    assert "EngineCore" not in done.stdout + done.stderr
