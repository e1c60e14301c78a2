# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Clients of a server under load: some finish, some go away, some send nonsense."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

NAME = "tiny"
LONGEST = 1024  # tokens of a request: the context of the embedded model
_SILENCE = 120  # seconds without a byte: a stuck request


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
        long = Question("apples " * 4 * LONGEST, 8)
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
