# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""An OpenAI server on the patched HPU worker, over two ranks, answers as one rank."""

from pathlib import Path

import pytest
import torch

from tests.e2e.server import Server
from tests.e2e.test_server import QUESTIONS
from tests.engines import engine
from tests.hpu.forced import OPTIONS, distributions
from tests.hpu.test_worker_serves import FP8, MODEL, texts
from tests.hpu.worker import environment, needs_worker

pytestmark = needs_worker


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ["--tensor-parallel-size", "2", "--max-model-len", "384"]
    variables = environment(SOFT_GAUDI="gaudi3")
    with Server(Path(MODEL), log, "gaudi3", arguments, variables) as running:
        yield running


def test_it_solves_the_problems_it_was_trained_for(server):
    right = 0
    for question, number in QUESTIONS.items():
        reply = server.chat([{"role": "user", "content": question}])
        right += f"#### {number}" in reply["choices"][0]["message"]["content"]
    assert right >= 3


def test_two_ranks_agree_with_the_cpu_backend(server):
    prompts, following = texts()
    config = {"fp8_inc": {"device": "gaudi3"}}
    with engine(MODEL, additional_config=config, **FP8, **OPTIONS) as llm:
        expected = distributions(llm, prompts, following, 1, False)[:, 0]
    answers = [server.complete(prompt, max_tokens=1, logprobs=1) for prompt in prompts]
    best = torch.tensor([a["logprobs"]["token_logprobs"][0] for a in answers])
    assert (best - expected.amax(-1)).abs().median() < 0.02


def test_both_ranks_report_the_scales(server):
    assert server.log().count("fp8_inc: KV scales of 4 of 4 layers") == 2
