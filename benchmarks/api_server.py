# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""An API server process, from its start until nothing of it is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import requests

_START_SECONDS = 900
_END_SECONDS = 60


class ApiServer:
    """``python -m vllm.entrypoints.openai.api_server`` on a free local port.

    As a context it is ready inside, and ``seconds`` is how long that took.

    Args:
        model: Folder of the checkpoint.
        name: What requests call the model.
        log_file: Where its output goes.
        arguments: More flags.
        python: The interpreter.
        environment: All of its variables; None for this process's.
    """

    def __init__(
        self,
        model: Path,
        name: str,
        log_file: Path,
        arguments: list[str],
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = log_file
        self.environment = environment
        self.command = [
            *[python, "-m", "vllm.entrypoints.openai.api_server"],
            *["--model", str(model), "--served-model-name", name],
            *["--host", "127.0.0.1", "--port", str(port)],
            *arguments,
        ]

    def __enter__(self) -> Self:
        start = time.monotonic()
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.log_file.parent,  # not a checkout, whose folders are modules
                start_new_session=True,
            )
        try:
            while not self._is_ready():
                late = time.monotonic() - start > _START_SECONDS
                if self.process.poll() is not None or late:
                    raise RuntimeError(f"the server did not start:\n{self.log()}")
                time.sleep(0.2)
        except BaseException:
            self._stop()
            raise
        self.seconds = time.monotonic() - start
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=2).ok
        except requests.RequestException:
            return False

    def log(self) -> str:
        """What it has written so far."""
        return self.log_file.read_text()
