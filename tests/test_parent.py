# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Who follows the process that started it, and who does not."""

import contextlib
import subprocess
import sys
import time

import psutil
import pytest

import vllm.fp8_inc.parent

SECONDS = 60
# Loaded by its path: three processes that import vLLM would take their time.
PARENT = """
import importlib.util, multiprocessing, signal, sys, threading, time

def child():
    spec = importlib.util.spec_from_file_location("parent", sys.argv[1])
    parent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parent)
    parent._SECONDS = 1
    if sys.argv[2].endswith("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.follow_parent()
    print(multiprocessing.current_process().pid, flush=True)
    time.sleep(600)

def main():
    spawn = multiprocessing.get_context("spawn")
    core = spawn.Process(target=child, name=sys.argv[2], daemon=True)
    starter = threading.Thread(target=core.start)
    starter.start()
    starter.join()
    print("the thread has ended", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def family(tmp_path):
    """Starts a parent and a child of a name."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    started = []

    def start(name: str) -> tuple[subprocess.Popen, psutil.Process]:
        parent = subprocess.Popen(
            [sys.executable, script, vllm.fp8_inc.parent.__file__, name],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(parent)
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        (pid,) = lines - {"the thread has ended"}
        started.append(psutil.Process(int(pid)))
        return started[-2], started[-1]

    yield start
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def lives(process: psutil.Process, seconds: float) -> bool:
    """Whether it still does after so many seconds; a zombie does not."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while time.monotonic() < deadline:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            time.sleep(0.05)
        return True
    return False


@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP1", "EngineCore deaf"])
def test_an_engine_core_ends_with_its_parent_and_not_with_a_thread(family, name):
    """A deaf one does not end at SIGTERM."""
    parent, core = family(name)
    assert lives(core, 1)  # the thread that started it is gone
    parent.kill()
    parent.wait(SECONDS)
    assert not lives(core, SECONDS)


def test_no_other_process_follows(family):
    parent, other = family("VllmWorker-0")
    parent.kill()
    parent.wait(SECONDS)
    assert lives(other, 3)
