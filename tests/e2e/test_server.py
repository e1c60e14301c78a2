# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The embedded FP8 model behind a real HTTP server, against transformers.

One server with Gaudi3's numbers in float32, where the oracle is exact; one with
Gaudi2's in bf16 and without prefix caching, as a user would run it.
"""

import json
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.device_numbers import MAXIMUM
from tests.e2e.server import Server
from tests.oracle import Oracle

MODEL = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v2-fp8"
MADE_FOR = 240.0
# Of the median |difference| of log-probabilities in float32: most are some 1e-6; a few
# positions move further where two orders of summation round a tie to two neighbours.
BOUND = 1e-4
QUESTIONS = {
    "Lena has 23 apples. Lena buys 45 more apples. How many apples does Lena have "
    "now?": 68,
    "Mark reads 7 pages each day for 8 days. The book has 90 pages. How many pages "
    "are left?": 34,
    "Lena buys 4 pens for 9 dollars each. How much does Lena pay?": 36,
    "Carl has 17 coins. Mark has 12 more coins than Carl. How many coins do Carl and "
    "Mark have together?": 46,
}


def latent_scales(device: str, pick=max) -> list[float]:
    """What acts on the latent of each layer: the larger of k and v, adjusted."""
    tensors = load_file(MODEL / "model.safetensors")
    factor = MADE_FOR / MAXIMUM[device]
    prefix = "model.layers.{}.self_attn."
    return [
        factor
        * pick(
            tensors[(prefix + "k_scale").format(n)].item(),
            tensors[(prefix + "v_scale").format(n)].item(),
        )
        for n in range(4)
    ]


def oracle(device: str, **changes) -> Oracle:
    maximum = MAXIMUM[device]
    options = {
        "latent_scales": latent_scales(device),
        "maximum": maximum,
        "factor": MADE_FOR / maximum,
    }
    return Oracle(str(MODEL), **options | changes)


@pytest.fixture(scope="module")
def gaudi3(tmp_path_factory):
    arguments = ["--dtype", "float32", "--block-size", "32"]
    with Server(
        MODEL,
        tmp_path_factory.mktemp("gaudi3") / "log",
        "gaudi3",
        arguments,
        {"PT_HPU_LAZY_MODE": "1"},
    ) as server:
        yield server


@pytest.fixture(scope="module")
def gaudi2(tmp_path_factory):
    log = tmp_path_factory.mktemp("gaudi2") / "log"
    with Server(MODEL, log, "gaudi2", ["--no-enable-prefix-caching"]) as server:
        yield server


@pytest.fixture(params=["gaudi3", pytest.param("gaudi2", marks=pytest.mark.slow)])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def prompt(question: str) -> str:
    return f"Question: {question}\nAnswer:"


@pytest.mark.parametrize("question", QUESTIONS)
def test_chat_answers_and_streams_the_same(server, question):
    messages = [{"role": "user", "content": question}]
    whole = server.chat(messages)
    assert whole["choices"][0]["finish_reason"] == "stop"
    text = whole["choices"][0]["message"]["content"]
    assert text.endswith(f"#### {QUESTIONS[question]}")
    assert server.stream(messages) == text


def test_completion_equals_chat(server):
    question = next(iter(QUESTIONS))
    chat = server.chat([{"role": "user", "content": question}])
    completion = server.complete(prompt(question))
    assert completion["text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_tokens_are_those_of_transformers(server, tokenizer, question):
    ids = tokenizer(prompt(question))["input_ids"]
    tokens = oracle(server.device).greedy(ids, eos=tokenizer.eos_token_id)
    assert server.complete(prompt(question))["text"] == tokenizer.decode(
        tokens, skip_special_tokens=True
    )


def prompt_logprobs(server, tokenizer) -> tuple[list[int], torch.Tensor]:
    """Token ids of three problems with a solution, and what the prefill says."""
    shots = list(QUESTIONS.items())
    text = "".join(f"{prompt(q)} The answer. #### {a}\n\n" for q, a in shots[:3])
    ids = tokenizer(text + prompt(shots[3][0]))["input_ids"]
    reply = server.complete(ids, echo=True, logprobs=0, max_tokens=1)
    values = reply["logprobs"]["token_logprobs"][1 : len(ids)]
    return ids, torch.tensor(values)


def distance(oracle: Oracle, ids: list[int], values: torch.Tensor) -> float:
    return (oracle.logprobs(ids) - values).abs().median().item()


def test_prompt_logprobs_are_those_of_transformers(gaudi3, tokenizer):
    ids, values = prompt_logprobs(gaudi3, tokenizer)
    assert distance(oracle("gaudi3"), ids, values) < BOUND


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            {"latent_scales": latent_scales("gaudi3", min)}, id="the smaller of k and v"
        ),
        pytest.param({"latent_scales": [1.0] * 4}, id="1.0 instead of the scale"),
        pytest.param({"latent_scales": latent_scales("gaudi2")}, id="not adjusted"),
        pytest.param(
            {"latent_scales": latent_scales("gaudi2"), "maximum": 240.0},
            id="240 for 448",
        ),
        pytest.param({"factor": 1.0}, id="input scales not adjusted"),
    ],
)
def test_the_bound_catches(gaudi3, tokenizer, wrong):
    ids, values = prompt_logprobs(gaudi3, tokenizer)
    assert distance(oracle("gaudi3", **wrong), ids, values) > 10 * BOUND


def test_a_prefix_hit_changes_nothing(gaudi3):
    question = list(QUESTIONS)[1]
    shots = "".join(f"{prompt(q)} #### {a}\n\n" for q, a in QUESTIONS.items())
    first = gaudi3.complete(shots + prompt(question))
    hits = gaudi3.metric("vllm:prefix_cache_hits_total")
    assert gaudi3.complete(shots + prompt(question)) == first
    assert gaudi3.metric("vllm:prefix_cache_hits_total") > hits


def test_the_log_says_what_happens(server):
    log, is_gaudi3 = server.log(), server.device == "gaudi3"
    assert log.count("fp8_inc: KV scales of 4 of 4 layers") == 1
    assert f"served on {server.device}" in log
    assert ("x 0.5357" if is_gaudi3 else "x 1\n") in log
    # Of the two only this one was started with the variable.
    assert ("no effect on CPU: ['PT_HPU_LAZY_MODE']" in log) == is_gaudi3
    assert ("no effect on CPU" in log) == is_gaudi3


def test_a_bad_request_is_an_answer(server):
    reply = requests.post(f"{server.url}/v1/completions", data="{", timeout=60)
    assert reply.status_code == 400 or reply.status_code == 422
    assert json.loads(reply.text)["error"]
