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
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.api_server import ApiServer
from benchmarks.load_clients import LONGEST, NAME, Load, Question, questions
from benchmarks.record import machine
from vllm.fp8_inc.whole_folder import new_file

MODEL = Path(__file__).parents[1] / "examples" / "tiny-deepseek-v2-fp8"
_BLOCK = 16
_TIE = 0.01  # log-probability
_QUIET_SECONDS = 60  # for the last requests, once the clients are gone


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


async def _watch(process: psutil.Process, until: float) -> list[dict[str, int]]:
    """Resident bytes of the API server, the engine and all processes, once a second."""
    sizes = []
    while time.monotonic() < until:
        size = {"": 0, " of the API server": process.memory_info().rss}
        size[" of the engine"] = 0
        for member in (process, *process.children(recursive=True)):
            size[""] += member.memory_info().rss
            if "EngineCore" in " ".join(member.cmdline()):
                size[" of the engine"] += member.memory_info().rss
        sizes.append(size)
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


def _memory(sizes: list[dict[str, int]]) -> dict[str, float]:
    """MB at a tenth (one minute of ten), at half and at the end."""
    places = {"a tenth": len(sizes) // 10, "half": len(sizes) // 2, "the end": -1}
    return {
        f"RSS{whose} at {name}, MB": round(sizes[n][whose] / 1e6)
        for whose in sizes[0]
        for name, n in places.items()
    }


def server(clients: int, log: Path) -> ApiServer:
    """A server whose cache holds a third of the clients' requests."""
    blocks = max(clients * LONGEST // _BLOCK // 3 // 4, LONGEST // _BLOCK)
    flags = [
        *("--kv-cache-dtype", "fp8_inc", "--enforce-eager", "--dtype", "float32"),
        *("--block-size", str(_BLOCK), "--max-num-seqs", str(clients)),
        *("--num-gpu-blocks-override", str(blocks)),
    ]
    return ApiServer(MODEL, NAME, log, flags)


def run(clients: int, seconds: float, log: Path) -> dict[str, Any]:
    """Starts a server, measures, ends it."""
    with server(clients, log) as running:
        family = psutil.Process(running.process.pid)
        result = asyncio.run(measure(running.url, family, clients, seconds))
        if running.process.poll() is not None:
            code = running.process.returncode
            result["problems"].append(f"the server ended with {code}")
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            result = run(args.clients, args.seconds, log)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
    print(json.dumps(result, indent=1))
    if args.out:
        where = machine()
        where["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
        with new_file(args.out) as part:
            part.write_text(json.dumps(where | result, indent=1) + "\n")
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
