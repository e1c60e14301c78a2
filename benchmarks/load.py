# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A server under load, with clients that misbehave: ``python -m benchmarks.load``.

It starts a server of the embedded model with KV space for a third of the clients, asks
every question once alone, then lets the clients stream, cancel, disconnect, and send
what is no request. At the end: was every finished answer the one given alone, is a
request stuck, has the memory grown?

The model runs in float32, where batches of other shapes agree to some 1e-6. Where
two tokens were as close as ``_TIE`` when asked alone, either may come: such answers are
counted as ties and must be equal up to that token.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

MODEL = Path(__file__).parents[1] / "examples" / "tiny-deepseek-v2-fp8"
NAME = "tiny"
_BLOCK = 16
_LONGEST = 1024  # tokens of a request: the context of the embedded model
_TIE = 0.01  # log-probability
_START_SECONDS = 400
_SILENCE = 120  # seconds without a byte: a stuck request
_QUIET_SECONDS = 60  # for the last requests, once the clients are gone


@dataclass(frozen=True)
class Question:
    """A prompt, what was answered alone, and where that was close.

    Attributes:
        prompt: The text.
        tokens: At most so many are asked for.
        answer: The text of the answer alone.
        sure: Characters of it before the first token with a close second.
    """

    prompt: str
    tokens: int
    answer: str = ""
    sure: int = 0


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def questions(number: int, seed: int = 0) -> list[Question]:
    """Word problems with no to twelve solved ones before them."""
    draw = random.Random(seed)
    shots = ["Question: Lena has {} apples. Lena buys {} more apples. How many apples "
             "does Lena have now?\nAnswer: {}\n\n"]  # fmt: skip
    found = []
    for _ in range(number):
        text = ""
        for _ in range(draw.choice([0, 1, 3, 6, 12])):
            a, b = draw.randrange(10, 60), draw.randrange(10, 60)
            text += shots[0].format(a, b, f"{a} + {b} = {a + b}. #### {a + b}")
        a, b = draw.randrange(2, 10), draw.randrange(2, 10)
        text += f"Question: Mark reads {a} pages each day for {b} days. How many pages "
        text += "does Mark read?\nAnswer:"
        found.append(Question(text, draw.choice([8, 32, 96])))
    return found


class Load:
    """Clients of one server.

    Args:
        url: Of the server.
        asked: Questions with their answers.
        until: ``time.monotonic`` at which no more are asked.
    """

    def __init__(self, url: str, asked: list[Question], until: float) -> None:
        self.url, self.asked, self.until = url, asked, until
        self.tally = Tally()
        self._acts = [
            *(self._finish,) * 12,
            *(self._cancel,) * 3,
            *(self._disconnect,) * 2,
            self._oversized,
            self._no_json,
            self._other_model,
        ]

    async def client(self, number: int) -> None:
        """Asks one thing after another."""
        draw = random.Random(number)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE)
        # A connection kept alive may be closed by the server as it is used again.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector
        ) as session:
            while time.monotonic() < self.until:
                act, question = draw.choice(self._acts), draw.choice(self.asked)
                try:
                    await act(session, question, draw)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    self._problem(act, f"{type(error).__name__}: {error}")

    def _problem(self, act: Any, text: str) -> None:
        self.tally.problems.append(f"{act.__name__.strip('_')}: {text}"[:500])

    def _post(self, session: aiohttp.ClientSession, question: Question, **more: Any):
        body = {"model": NAME, "prompt": question.prompt, "temperature": 0}
        body |= {"max_tokens": question.tokens, "stream": True} | more
        return session.post(f"{self.url}/v1/completions", json=body)

    async def _finish(self, session, question, draw) -> None:
        start, first, text = time.monotonic(), None, ""
        async with self._post(session, question) as reply:
            if reply.status != 200:
                self._problem(self._finish, f"{reply.status} {await reply.text()}")
                return
            async for part in _parts(reply):
                first = first or time.monotonic()
                if "error" in part:
                    self._problem(self._finish, str(part["error"]))
                    return
                text += part["choices"][0]["text"]
        now = time.monotonic()
        self.tally.first.append((first or now) - start)
        self.tally.whole.append(now - start)
        self._compare(question, text)

    def _compare(self, question: Question, text: str) -> None:
        sure = question.answer[: question.sure]
        if text == question.answer:
            self.tally.counts["finished, equal"] += 1
        elif sure != question.answer and text.startswith(sure):
            self.tally.counts["finished, equal up to a tie"] += 1
        else:
            said = f"{text!r} instead of {question.answer!r}"
            self._problem(self._finish, said)

    async def _cancel(self, session, question, draw) -> None:
        """Goes away after some tokens, as a user who has seen enough."""
        left = draw.randrange(1, 8)
        async with self._post(session, question) as reply:
            async for _ in _parts(reply):
                left -= 1
                if not left:
                    break
            reply.close()
        self.tally.counts["cancelled"] += 1

    async def _disconnect(self, session, question, draw) -> None:
        """Is cut off before the first byte of an answer."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(
            {"model": NAME, "prompt": question.prompt, "max_tokens": question.tokens}
        )
        length = len(body) + draw.choice([0, 0, 100])  # or in the middle of a request
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        await asyncio.sleep(draw.random() * 0.2)
        writer.transport.abort()
        self.tally.counts["disconnected"] += 1

    async def _refused(self, act: Any, reply: Any, *statuses: int) -> None:
        text = await reply.text()
        if reply.status in statuses and "error" in text:
            self.tally.counts[f"refused, {act.__name__.strip('_')}"] += 1
        else:
            self._problem(act, f"{reply.status} {text}")

    async def _oversized(self, session, question, draw) -> None:
        long = Question("apples " * 4 * _LONGEST, 8)
        async with self._post(session, long) as reply:
            await self._refused(self._oversized, reply, 400)

    async def _no_json(self, session, question, draw) -> None:
        data = draw.choice([b"", b"{", b"\xff", b"[]", b'{"prompt": 3', b"[" * 10_000])
        headers = {"Content-Type": "application/json"}
        url = f"{self.url}/v1/completions"
        async with session.post(url, data=data, headers=headers) as reply:
            await self._refused(self._no_json, reply, 400, 422)

    async def _other_model(self, session, question, draw) -> None:
        async with self._post(session, question, model="other") as reply:
            await self._refused(self._other_model, reply, 404)


async def _parts(reply: aiohttp.ClientResponse):
    """The events of a stream."""
    async for line in reply.content:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


async def _alone(url: str, asked: list[Question]) -> list[Question]:
    """Asks each question with nobody else there."""
    answered = []
    async with aiohttp.ClientSession() as session:
        for question in asked:
            body = {"model": NAME, "prompt": question.prompt, "temperature": 0}
            body |= {"max_tokens": question.tokens, "logprobs": 2}
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                choice = (await reply.json())["choices"][0]
            answer, probabilities = choice["text"], choice["logprobs"]
            sure = len(answer)
            offsets = probabilities["text_offset"]
            for at, top in zip(offsets, probabilities["top_logprobs"]):
                best = sorted(top.values(), reverse=True)
                if len(best) > 1 and best[0] - best[1] < _TIE:
                    sure = min(sure, at - offsets[0])
            answered.append(Question(question.prompt, question.tokens, answer, sure))
    return answered


async def _metrics(url: str) -> dict[str, float]:
    """Sum of each metric over its labels."""
    found: Counter = Counter()
    for line in (await _get(f"{url}/metrics"))[1].splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)
    return found


async def _get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()


async def _watch(process: psutil.Process, until: float) -> list[int]:
    """Resident bytes of the server and its processes, once a second."""
    sizes = []
    while time.monotonic() < until:
        family = [process, *process.children(recursive=True)]
        sizes.append(sum(member.memory_info().rss for member in family))
        await asyncio.sleep(1)
    return sizes


async def measure(
    url: str, process: psutil.Process, clients: int, seconds: float
) -> dict[str, Any]:
    """Runs the load; returns what to report, with ``problems`` that must be none."""
    asked = await _alone(url, questions(24))
    before, until = await _metrics(url), time.monotonic() + seconds
    load = Load(url, asked, until)
    *_, sizes = await asyncio.gather(
        *(load.client(n) for n in range(clients)), _watch(process, until)
    )
    tally, problems = load.tally, list(load.tally.problems)
    after = await _quiet(url)
    running = after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"]
    if running:
        problems.append(f"{running:g} requests are stuck")
    if after["vllm:kv_cache_usage_perc"] > 0:
        problems.append(f"{after['vllm:kv_cache_usage_perc']:.1%} of the cache is held")
    status, _ = await _get(f"{url}/health")
    if status != 200:
        problems.append(f"/health is {status}")
    for question, again in zip(asked, await _alone(url, asked)):
        if question.answer != again.answer:
            problems.append(f"afterwards {again.answer!r}, not {question.answer!r}")
    preempted = "vllm:num_preemptions_total"
    return {
        "clients": clients,
        "seconds": seconds,
        **dict(sorted(tally.counts.items())),
        "preemptions": after[preempted] - before[preempted],
        **_percentiles("to the first token, s", tally.first),
        **_percentiles("to the last token, s", tally.whole),
        **_memory(sizes),
        "problems": problems,
    }


async def _quiet(url: str) -> dict[str, float]:
    """The metrics once nothing runs, or when it has been long enough."""
    deadline = time.monotonic() + _QUIET_SECONDS
    while True:
        found = await _metrics(url)
        busy = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
        if not busy or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100)
    return {f"{name}, p{n}": round(cuts[n - 1], 3) for n in (50, 90, 99)}


def _memory(sizes: list[int]) -> dict[str, float]:
    """MB at a tenth (one minute of ten), at half and at the end."""
    places = {"a tenth": len(sizes) // 10, "half": len(sizes) // 2, "the end": -1}
    return {f"RSS at {name}, MB": round(sizes[n] / 1e6) for name, n in places.items()}


def server_command(port: int, clients: int) -> list[str]:
    """A server whose cache holds a third of the clients' requests."""
    blocks = max(clients * _LONGEST // _BLOCK // 3 // 4, _LONGEST // _BLOCK)
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(MODEL), "--served-model-name", NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--kv-cache-dtype", "fp8_inc", "--enforce-eager", "--dtype", "float32"),
        *("--block-size", str(_BLOCK), "--max-num-seqs", str(clients)),
        *("--num-gpu-blocks-override", str(blocks)),
    ]


def run(clients: int, seconds: float, log: Path) -> dict[str, Any]:
    """Starts a server, measures, ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as file:
        process = subprocess.Popen(
            server_command(port, clients),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_ready(url, process))
        result = asyncio.run(
            measure(url, psutil.Process(process.pid), clients, seconds)
        )
        if process.poll() is not None:
            result["problems"].append(f"the server ended with {process.returncode}")
        return result
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


async def _ready(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            if (await _get(f"{url}/health"))[0] == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start ({process.poll()})")
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            result = run(args.clients, args.seconds, log)
        except RuntimeError as error:
            sys.exit(f"error: {error}\n{log.read_text()[-4000:]}")
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
