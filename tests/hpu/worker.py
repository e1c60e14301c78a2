# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Starts processes in which vLLM runs on the HPU worker and the software Gaudi.

Their own processes, because vLLM chooses its platform once, as it is imported.
VLLM_GAUDI names a checkout of vllm-gaudi; `make test-hpu` installs what the worker
imports beside vLLM's own requirements into build/hpu/packages.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from forkbuild.patchset import load_series
from forkbuild.worker import write_worker

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "build" / "hpu" / "packages"
CHECKOUT = os.environ.get("VLLM_GAUDI", "")
needs_worker = pytest.mark.skipif(
    not CHECKOUT,
    reason="VLLM_GAUDI is not set; `make test-hpu VLLM_GAUDI=/path/to/vllm-gaudi`",
)
# Above this the worker expects Intel's own build of INC.
_BUILD = "1.23.0.1"
# Seconds, of which a start needs some for each of its silent steps.
SILENCE = 300


@dataclass(frozen=True)
class Job:
    """One engine and what it is asked.

    Attributes:
        model: Folder of a checkpoint.
        rounds: Lists of prompts, one after the other.
        forced: The token that continues each prompt.
        steps: Tokens to generate.
        options: Of the LLM.
        env: Environment variables for this engine only.
    """

    model: str
    rounds: Sequence[Sequence[list[int]]]
    forced: Sequence[int]
    steps: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


@functools.cache
def worker_folder(patched: bool) -> Path:
    """A copy of the checkout that Python can import, with or without our patches."""
    out = ROOT / "build" / "hpu" / ("patched" if patched else "unpatched")
    folder = ROOT / "patches" / "vllm_gaudi"
    write_worker(Path(CHECKOUT), out, load_series(folder) if patched else [])
    return out


def environment(patched: bool = True, **variables: str) -> dict[str, str]:
    """The environment of a process on the HPU worker.

    Args:
        patched: Whether the worker has our patches.
        **variables: SOFT_GAUDI and PT_HPU_LAZY_MODE, for example.
    """
    folders = [PACKAGES, worker_folder(patched), ROOT / "software_gaudi"]
    inherited = os.environ.get("PYTHONPATH")
    path = [*map(str, folders), *([inherited] if inherited else [])]
    return (
        os.environ
        | {
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_BUILD": _BUILD,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        | variables
    )


def watched(command: Sequence[str], env: dict[str, str], cwd: Path) -> tuple[int, str]:
    """Runs a command for as long as it has something to say.

    Returns:
        Its exit code, negative where it was silent for SILENCE seconds and so was
        killed, and its output.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=log, stderr=subprocess.STDOUT
        )
        heard = -1
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SILENCE)
            said = os.fstat(log.fileno()).st_size
            if process.poll() is None and said == heard:
                process.kill()
                process.wait()
            heard = said
        log.seek(0)
        return process.returncode, log.read()


def run_jobs(
    folder: Path, jobs: dict[str, Job], patched: bool = True, **variables: str
) -> dict[str, dict[str, Any]]:
    """Runs all jobs in one process.

    Returns:
        What tests/hpu/inside_worker.py found, by job; distributions as tensors, and
        what the first rank has beside ``ranks``.
    """
    asked, answered = folder / "jobs.json", folder / "results.json"
    asked.write_text(json.dumps([vars(job) for job in jobs.values()]), "utf-8")
    code, log = watched(
        [sys.executable, "-m", "tests.hpu.inside_worker", str(asked), str(answered)],
        environment(patched, **variables),
        ROOT,
    )
    assert code == 0, log[-8000:]
    results = json.loads(answered.read_text("utf-8"))
    for result in results:
        rounds = result["distributions"]
        result["distributions"] = [torch.tensor(values) for values in rounds]
        result["log"] = log
        result |= result["ranks"][0]
    return dict(zip(jobs, results, strict=True))
