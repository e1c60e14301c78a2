# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A server process, as ``make serve`` starts it, and a client for it."""

import json
import os
from pathlib import Path
from typing import Any

import requests

from benchmarks.api_server import ApiServer

_ANSWER_SECONDS = 120


class Server(ApiServer):
    """A server with an FP8 cache that calls its model "tiny".

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
        # Bound to every core, its threads crawl beside another test.
        one_thread = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        variables = os.environ | one_thread | (environment or {})
        # The server is to run as a user starts it, with its own processes.
        variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        flags = [
            *["--kv-cache-dtype", "fp8_inc", "--enforce-eager"],
            *["--additional-config", json.dumps({"fp8_inc": {"device": device}})],
            *arguments,
        ]
        super().__init__(model, "tiny", log_file, flags, environment=variables)

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
