# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""lm-eval against a server, inside an engine, and from `kv-scales compare`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.kv_scales.command import call

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "tiny-deepseek-v2-fp8"
TASK = EXAMPLES / "tasks" / "word-problems.yaml"
QUESTIONS = 16
# The model answers seven of ten, a broken one none: four standard errors lie between.
RIGHT = 0.25

pytestmark = pytest.mark.slow


def lm_eval(tmp_path: Path, model: str, arguments: dict[str, object]) -> dict:
    """Figures of the task by filter, from the command line."""
    pytest.importorskip("lm_eval")
    words = ["--model", model, "--tasks", "word-problems", "--limit", str(QUESTIONS)]
    words += ["--include_path", str(TASK.parent), "--output_path", str(tmp_path)]
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", *words, "--model_args", given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("results_*.json")
    found = json.loads(path.read_text())["results"]["word-problems"]
    names = ("strict-match", "flexible-extract")
    return {name: found[f"exact_match,{name}"] for name in names}


def test_the_server_s_figures_are_those_of_compare(tmp_path, capfd):
    pytest.importorskip("tenacity", reason="lm_eval[api]")
    with Server(MODEL, tmp_path / "log", "gaudi2", []) as server:
        arguments = {
            "model": "tiny",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": MODEL,
            "tokenized_requests": False,
            "num_concurrent": 4,
            "max_length": 1024,
        }
        served = lm_eval(tmp_path / "served", "local-completions", arguments)
    words = ["--tasks", TASK, "--limit", QUESTIONS, "--device", "gaudi2"]
    words += ["--max-model-len", "1024", "--format", "json"]
    compared = call(capfd, "compare", MODEL, *words)
    assert compared.code in (0, 1), compared.err
    loaded = {
        row["filter"]: row["value"]
        for row in compared.json["arms"]
        if row["arm"] == "fp8-loaded"
    }
    assert served == loaded
    assert min(served.values()) > RIGHT


def test_the_arguments_of_the_original_request(tmp_path):
    """But for the model, and its length."""
    arguments = {
        "pretrained": MODEL,
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.85,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 32768,
        "kv_cache_dtype": "fp8_inc",
        "enforce_eager": True,
    }
    found = lm_eval(tmp_path, "vllm", arguments)
    assert min(found.values()) > RIGHT
