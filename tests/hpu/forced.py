# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Distributions after prescribed continuations, on the CPU and in the HPU worker.

Not tests/engines.py's ask: the worker's prompt_logprobs fail with MLA (it takes the
first row of hidden states that are flat), and free generation drifts apart at
near-ties.
"""

from typing import Any

import torch

# What the engine must be started with for ``distributions``.
OPTIONS = {"max_logprobs": -1}


def distributions(
    llm: Any,
    prompts: list[list[int]],
    forced: list[int],
    steps: int,
    together: bool = True,
) -> torch.Tensor:
    """Continues each prompt with one token again and again.

    Args:
        llm: An engine started with OPTIONS.
        prompts: Token ids.
        forced: The token that continues each prompt.
        steps: Tokens to add; the first comes from the prefill, the others from decode.
        together: Whether prompts may share a batch. vLLM's CPU sampler forgets
            allowed_token_ids in a batch with a prompt that is not yet whole.

    Returns:
        float32 [prompts, steps, vocabulary], log-probabilities before a continuation
        is forced.
    """
    from vllm import SamplingParams

    # The worker does not know -1, for all.
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    parameters = [
        SamplingParams(
            temperature=0,
            max_tokens=steps,
            logprobs=vocabulary,
            allowed_token_ids=[token],
            detokenize=False,
            ignore_eos=True,
        )
        for token in forced
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    if together:
        results = llm.generate(asked, parameters, use_tqdm=False)
    else:
        results = [
            llm.generate(prompt, parameter, use_tqdm=False)[0]
            for prompt, parameter in zip(asked, parameters, strict=True)
        ]
    for result, token in zip(results, forced, strict=True):
        assert list(result.outputs[0].token_ids) == [token] * steps
    return torch.tensor(
        [
            [[step[n].logprob for n in range(vocabulary)] for step in output.logprobs]
            for output in (result.outputs[0] for result in results)
        ]
    )


def divergence(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The Kullback-Leibler divergence of each step, [prompts, steps], in nats."""
    return (one.exp() * (one - other)).sum(-1)
