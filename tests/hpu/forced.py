# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Log-probabilities of prescribed continuations, on the CPU and in the HPU worker.

Not tests/engines.py's ``ask``: the worker's prompt_logprobs fail with MLA (it takes the
first row of its flat hidden states), and free generation drifts apart at near-ties.
"""

from typing import Any

# What the engine must be started with for ``distributions``.
OPTIONS = {"max_logprobs": -1}


def distributions(
    llm: Any,
    prompts: list[list[int]],
    forced: list[int],
    steps: int,
    vocabulary: int,
) -> list[list[list[float]]]:
    """Continues each prompt with one token again and again.

    Args:
        llm: An engine started with OPTIONS.
        prompts: Token ids.
        forced: The token that continues each prompt.
        steps: Tokens to add; the first comes from the prefill, the others from decode.
        vocabulary: Size of the model's; the worker does not know -1 for all.

    Returns:
        [prompt][step][token]: log-probability of every token of the vocabulary, before
        the continuation was forced.
    """
    from vllm import SamplingParams

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
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        parameters,
        use_tqdm=False,
    )
    answers = []
    for result in results:
        steps_of = result.outputs[0].logprobs
        answers.append(
            [[step[token].logprob for token in sorted(step)] for step in steps_of]
        )
    return answers
