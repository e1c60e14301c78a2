# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Real vLLM engines inside the test process: a start takes two seconds."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def engine(model: str, **options: Any) -> Iterator[Any]:
    """Starts an LLM on token ids, with an fp8_inc cache unless told otherwise."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "kv_cache_dtype": "fp8_inc",
    } | options
    llm = None
    try:
        llm = LLM(model, **options)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()  # worker processes, if there are
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        # A start that fails leaves the dtype of the model behind.
        torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Answer:
    """What the engine made of a prompt.

    Attributes:
        tokens: Prompt and generated token ids.
        prompt_tokens: How many of them are the prompt.
        logprobs: float32 [len(tokens) - 1], of each token but the first.
    """

    tokens: list[int]
    prompt_tokens: int
    logprobs: torch.Tensor

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def prefill(self) -> torch.Tensor:
        """Log-probabilities that the prefill computed."""
        return self.logprobs[: self.prompt_tokens]

    @property
    def decode(self) -> torch.Tensor:
        """Log-probabilities that decode steps computed."""
        return self.logprobs[self.prompt_tokens :]


def ask(llm: Any, prompts: list[list[int]], tokens: int = 8) -> list[Answer]:
    """Generates greedily, with the log-probability of every token."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        prompt_logprobs=0,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
    )
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        parameters,
        use_tqdm=False,
    )
    answers = []
    for prompt, result in zip(prompts, results, strict=True):
        new = list(result.outputs[0].token_ids)
        steps = result.prompt_logprobs[1:] + result.outputs[0].logprobs
        values = [
            step[token].logprob
            for step, token in zip(steps, prompt[1:] + new, strict=True)
        ]
        answers.append(Answer(prompt + new, len(prompt), torch.tensor(values)))
    return answers


def model_of(llm: Any) -> nn.Module:
    """The model inside an engine of this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return worker.worker.model_runner.model


def attention_layers(llm: Any) -> list[nn.Module]:
    """Its attention layers, first to last."""
    return attention_layers_of(model_of(llm))


def attention_layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that have a cache, first to last."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "kv_cache_dtype") and hasattr(module, "impl")
    ]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without a period."""
    return [(7 * i * i + 3 * i + 11 * seed) % 128 for i in range(length)]


def acting(scale: float) -> float:
    """The dequant scale that acts: 1 / bf16(1 / scale)."""
    return torch.tensor(scale).reciprocal().bfloat16().float().reciprocal().item()


def loaded(llm: Any) -> list[dict[str, float | None]]:
    """The dequant scales that act in each layer."""
    scales = [layer.impl.scales for layer in attention_layers(llm)]
    return [
        {
            "k": s.k.dequant_scale.item(),
            "v": s.v.dequant_scale.item(),
            "q": s.q and s.q.dequant_scale.item(),
        }
        for s in scales
    ]
