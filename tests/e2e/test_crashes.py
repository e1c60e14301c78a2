# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What dies takes the server with it, at once and with an exit code; a restart serves.

The container's healthcheck is run as the Dockerfile has it.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import requests

from tests.e2e.server import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-deepseek-v2-fp8"
QUESTION = "Question: Mark reads 7 pages each day for 8 days."
# Until a client has its error and the process its end; a shared machine is slow.
SECONDS = 30
_FIRST = 200  # until the first token of a server that has just started


def processes(server: Server, name: str) -> list[psutil.Process]:
    """Processes of the server by their title."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [member for member in family if name in " ".join(member.cmdline())]


class Client(threading.Thread):
    """Streams a long answer; keeps how it ended."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.url, self.lines, self.error = server.url, [], None
        self.is_answered = threading.Event()

    def run(self) -> None:
        body = {"model": "tiny", "prompt": QUESTION, "max_tokens": 900}
        body |= {"stream": True, "ignore_eos": True}
        try:
            with requests.post(
                f"{self.url}/v1/completions", json=body, stream=True, timeout=_FIRST
            ) as reply:
                for line in reply.iter_lines():
                    self.lines.append(line.decode())
                    self.is_answered.set()
        except requests.RequestException as error:
            self.error = error

    @property
    def failed(self) -> bool:
        """Whether it was told that its answer is not whole."""
        return self.error is not None or any('"error"' in line for line in self.lines)


@contextlib.contextmanager
def serving(tmp_path, *arguments: str):
    """A server and a client in the middle of an answer."""
    with Server(MODEL, tmp_path / "log", "gaudi3", list(arguments)) as server:
        client = Client(server)
        client.start()
        assert client.is_answered.wait(_FIRST)
        assert requests.get(f"{server.url}/health", timeout=_FIRST).ok
        yield server, client


def healthcheck(server: Server) -> int:
    """The exit code of the image's healthcheck, against this server."""
    text = (ROOT / "Dockerfile").read_text()
    found = re.findall(r'HEALTHCHECK.*\\\n\s+CMD \["[^"]*", "-c", "(.*)"\]', text)
    assert len(found) == 2 and len(set(found)) == 1
    port = server.url.rpartition(":")[2]
    code = found[0].replace("8000", port)
    assert code != found[0]
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode


def ends(server: Server, client: Client) -> int:
    """Waits for the client's error and the server's end; returns the exit code."""
    client.join(SECONDS)
    assert not client.is_alive() and client.failed
    code = server.process.wait(SECONDS)
    with pytest.raises(requests.RequestException):
        requests.get(f"{server.url}/health", timeout=5)
    assert healthcheck(server) != 0
    return code


def no_orphan(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, SECONDS)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_the_engine_core_is_killed(tmp_path):
    with serving(tmp_path) as (server, client):
        assert healthcheck(server) == 0
        (core,) = processes(server, "EngineCore")
        core.kill()
        assert ends(server, client) not in (0, None)
    with serving(tmp_path) as (server, client):  # a restart serves
        answer = server.complete(QUESTION, max_tokens=4)
        assert answer["finish_reason"] == "length"


def test_a_worker_is_killed(tmp_path):
    arguments = ["--tensor-parallel-size", "2"]
    with serving(tmp_path, *arguments) as (server, client):
        family = psutil.Process(server.process.pid).children(recursive=True)
        processes(server, "Worker")[1].kill()
        assert ends(server, client) not in (0, None)
        no_orphan(family)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_api_server_is_killed(tmp_path, ranks):
    """Its engine core sees it (vllm/fp8_inc/parent.py), and the workers their core."""
    with serving(tmp_path, "--tensor-parallel-size", str(ranks)) as (server, client):
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert processes(server, "EngineCore")
        server.process.kill()
        try:
            assert ends(server, client) == -signal.SIGKILL
            no_orphan(family)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end(tmp_path, number):
    """As `docker stop` and Ctrl-C do."""
    with serving(tmp_path) as (server, client):
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(number)
        assert ends(server, client) == 0
        no_orphan(family)


def test_a_core_that_stands_still_is_seen_by_a_request_only(tmp_path):
    """/health asks the API server about its engine: dead, it knows; stopped, not."""
    with serving(tmp_path) as (server, client):
        (core,) = processes(server, "EngineCore")
        core.suspend()
        try:
            time.sleep(1)
            assert healthcheck(server) == 0
            with pytest.raises(requests.Timeout):
                requests.post(
                    f"{server.url}/v1/completions",
                    data=json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}),
                    headers={"Content-Type": "application/json"},
                    timeout=3,
                )
        finally:
            core.resume()
        client.join(4 * SECONDS)
        assert not client.failed
