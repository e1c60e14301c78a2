# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a sequence answers does not depend on its neighbours, nor on what was before.

The embeddings of two tokens are NaN and infinite, and with them q, k and v of every
layer at and after such a token.
"""

from dataclasses import dataclass

import pytest
import torch

from tests.checkpoints import BUILDERS, kv_scales, quantization_config, weights, write
from tests.engines import engine, prompt

NAN, INFINITE = 127, 126
BLOCK, BLOCKS = 16, 24
# Of the median |difference| of log-probabilities in float32: FP8 ties, see the traps of
# tests/e2e/test_server.py.
BOUND = 1e-4
# The same after a preemption, where the prefill computes what decode steps did: MLA
# expands K and V for it and absorbs them there.
RECOMPUTED = 1e-3


@dataclass(frozen=True)
class Greedy:
    """Token ids, and float32 log-probability of each."""

    tokens: list[int]
    logprobs: torch.Tensor


def spoiled(folder, kind: str) -> str:
    """A checkpoint with two tokens that spoil a sequence."""
    config = BUILDERS[kind]()
    config["quantization_config"] = quantization_config(config_groups={})
    tensors = weights(config)
    tensors["model.embed_tokens.weight"][NAN] = torch.nan
    tensors["model.embed_tokens.weight"][INFINITE] = torch.inf
    tensors["lm_head.weight"][[NAN, INFINITE]] = 0  # no answer has them
    return write(folder, config, tensors | kv_scales(config))


def clean(length: int, seed: int) -> list[int]:
    return [token % INFINITE for token in prompt(length, seed)]


def poison(length: int, seed: int, token: int) -> list[int]:
    """Clean, but for a token in the middle."""
    ids = clean(length, seed)
    ids[length // 2] = token
    return ids


def greedy(llm, prompts: list[list[int]], tokens: int = 12) -> list[Greedy]:
    """Without prompt_logprobs, with which vLLM looks for no prefix."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True
    )
    results = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False
    )
    answers = []
    for result in results:
        (out,) = result.outputs
        new = list(out.token_ids)
        steps = zip(out.logprobs, new, strict=True)
        values = [step[token].logprob for step, token in steps]
        answers.append(Greedy(new, torch.tensor(values)))
    return answers


def metric(llm, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def same(one: Greedy, other: Greedy) -> None:
    assert one.tokens == other.tokens
    assert torch.equal(one.logprobs, other.logprobs)


def close(one: Greedy, other: Greedy, bound: float = BOUND) -> None:
    assert one.tokens == other.tokens
    difference = (one.logprobs - other.logprobs).abs()
    assert difference.median().item() < bound


@pytest.fixture(scope="module", params=BUILDERS)
def llm(request, tmp_path_factory):
    """An engine with room for 24 blocks of 16 tokens."""
    path = spoiled(tmp_path_factory.mktemp(request.param), request.param)
    with engine(
        path,
        dtype="float32",
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True,
        disable_log_stats=False,
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def no_prefix(llm):
    llm.reset_prefix_cache()


@pytest.mark.parametrize("token", [NAN, INFINITE])
def test_a_spoiled_sequence_spoils_no_other(llm, token):
    """The batches have the same shape, so that the arithmetic is the same."""
    first, second = clean(21, 1), clean(37, 2)
    expected = greedy(llm, [first, clean(30, 3), second])
    assert all(answer.logprobs.isfinite().all() for answer in expected)
    llm.reset_prefix_cache()
    found = greedy(llm, [first, poison(30, 3, token), second])
    assert not found[1].logprobs.isfinite().any()
    same(found[0], expected[0])
    same(found[2], expected[2])


@pytest.mark.parametrize("token", [NAN, INFINITE])
def test_freed_blocks_leak_into_nobody(llm, token):
    """Blocks are reused whole and in part; what lies behind the last token is NaN."""
    ids = clean(BLOCK + 3, 4)
    (expected,) = greedy(llm, [ids])
    for seed in range(3):  # more than all blocks, each one spoiled
        llm.reset_prefix_cache()
        spoiler = [token, *clean(240, seed)]
        assert not greedy(llm, [spoiler])[0].logprobs.isfinite().any()
    llm.reset_prefix_cache()
    same(greedy(llm, [ids])[0], expected)


def test_a_prefix_hit_changes_no_token(llm):
    ids = clean(5 * BLOCK + 3, 5)
    (expected,) = greedy(llm, [ids])
    hits = metric(llm, "vllm:prefix_cache_hits")
    (found,) = greedy(llm, [ids])
    assert metric(llm, "vllm:prefix_cache_hits") >= hits + 4 * BLOCK
    close(found, expected)


def test_what_stands_before_a_nan_is_no_spoiled_prefix(llm):
    """Two blocks of it are the same, and hits for the next."""
    ids = clean(3 * BLOCK, 6)
    (expected,) = greedy(llm, [ids])
    llm.reset_prefix_cache()
    spoiler = [*ids[: 2 * BLOCK], NAN, *ids[2 * BLOCK + 1 :]]
    greedy(llm, [spoiler])
    close(greedy(llm, [ids])[0], expected)


def test_the_order_of_a_batch_does_not_matter(llm):
    prompts = [clean(length, length) for length in (9, 40, 17, 33)]
    expected = greedy(llm, prompts)
    llm.reset_prefix_cache()
    for found, answer in zip(greedy(llm, prompts[::-1])[::-1], expected, strict=True):
        close(found, answer)


@pytest.mark.slow
def test_preempted_sequences_are_computed_again(llm):
    """Six sequences of up to 6 blocks do not fit in 24."""
    prompts = [clean(30 + n, 10 + n) for n in range(6)]
    alone = []
    for ids in prompts:
        alone += greedy(llm, [ids], tokens=60)
        llm.reset_prefix_cache()
    before = metric(llm, "vllm:num_preemptions")
    together = greedy(llm, prompts, tokens=60)
    assert metric(llm, "vllm:num_preemptions") > before
    for found, expected in zip(together, alone, strict=True):
        close(found, expected, RECOMPUTED)
