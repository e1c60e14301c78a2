# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A server process, as ``make serve`` starts it, and a client for it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests

_START_SECONDS = 400
_ANSWER_SECONDS = 120


class Server:
    """``python -m vllm.entrypoints.openai.api_server`` on a free local port.

    Args:
        model: Folder of the checkpoint.
        log_file: Where its output goes.
        device: gaudi2 or gaudi3.
        arguments: More flags.
        environment: More variables.
    """

    def __init__(
        self,
        model: Path,
        log_file: Path,
        device: str,
        arguments: list[str],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.device = device
        self.log_file = log_file
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.command = [
            *[sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
            *["--model", str(model), "--served-model-name", "tiny"],
            *["--host", "127.0.0.1", "--port", str(port)],
            *["--kv-cache-dtype", "fp8_inc", "--enforce-eager"],
            *["--additional-config", json.dumps({"fp8_inc": {"device": device}})],
            *arguments,
        ]
        # Bound to every core, its threads crawl beside another test.
        one_thread = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | one_thread | (environment or {})
        # The server is to run as a user starts it, with its own processes.
        self.environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)

    def __enter__(self) -> "Server":
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._stop()
                raise RuntimeError(f"the server did not start:\n{self.log()}")
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)

    def _is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=2).ok
        except requests.RequestException:
            return False

    def log(self) -> str:
        """What it has written so far."""
        return self.log_file.read_text()

    def metric(self, name: str) -> float:
        """The value of a Prometheus counter."""
        for line in requests.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line.startswith(name):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def _post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        body = {"model": "tiny", "temperature": 0} | body
        reply = requests.post(
            f"{self.url}{path}", json=body, timeout=_ANSWER_SECONDS, **options
        )
        reply.raise_for_status()
        return reply

    def chat(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """One chat completion."""
        return self._post("/v1/chat/completions", {"messages": messages}).json()

    def complete(self, prompt: str | list[int], **body: Any) -> dict[str, Any]:
        """The first choice of a completion."""
        body = {"prompt": prompt, "max_tokens": 80} | body
        return self._post("/v1/completions", body).json()["choices"][0]

    def stream(self, messages: list[dict[str, str]]) -> str:
        """The text of a streamed chat completion."""
        reply = self._post(
            "/v1/chat/completions", {"messages": messages, "stream": True}, stream=True
        )
        text = ""
        for line in reply.iter_lines():
            data = line.decode().removeprefix("data: ")
            if data in ("", "[DONE]"):
                continue
            text += json.loads(data)["choices"][0]["delta"].get("content") or ""
        return text
