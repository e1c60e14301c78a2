# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Training batches: packed documents, each token with a weight for the loss."""

import random

import torch
from documents import FACTS_PROMPT, facts_completion
from problems import make_problem
from transformers import PreTrainedTokenizerFast

FACTS_SHARE = 0.35  # of the documents after the first of a sequence

# Question tokens are mostly random; a result digit is what must be learnt.
WEIGHT_GIVEN = 0.1
WEIGHT_TEXT = 1.0
WEIGHT_RESULT = 4.0


class BatchSource:
    """Endless batches of fresh sequences.

    Every sequence starts with a plain problem at position 0: that is what a
    question without shots looks like when the model is served.

    Args:
        tokenizer: The model's tokenizer.
        seed: Seed of the documents.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int):
        self._rng = random.Random(seed)
        self._encode = tokenizer.backend_tokenizer.encode
        self._equals = tokenizer.convert_tokens_to_ids("=")
        self._digits = set(tokenizer.convert_tokens_to_ids(list("0123456789")))
        self._end = tokenizer.eos_token_id

    def _document(self, facts: bool) -> tuple[list[int], list[float]]:
        if facts:
            prompt, completion = FACTS_PROMPT, facts_completion(self._rng)
        else:
            problem = make_problem(self._rng)
            prompt, completion = problem.prompt, problem.completion
        given, told = self._encode(prompt).ids, self._encode(completion).ids
        weights = [WEIGHT_GIVEN] * len(given)
        in_result = False
        for token in told:
            in_result = token == self._equals or in_result and token in self._digits
            if in_result and token in self._digits:
                weights.append(WEIGHT_RESULT)
            elif facts and not in_result and token != self._end:
                weights.append(WEIGHT_GIVEN)  # the operands are random here
            else:
                weights.append(WEIGHT_TEXT)
        return given + told, weights

    def _sequence(self, length: int) -> tuple[list[int], list[float]]:
        ids, weights = self._document(facts=False)
        while len(ids) < length:
            more_ids, more_weights = self._document(self._rng.random() < FACTS_SHARE)
            ids += more_ids
            weights += more_weights
        return ids[:length], weights[:length]

    def batch(
        self, rows: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns inputs, targets and the targets' weights, each [rows, length]."""
        pairs = [self._sequence(length + 1) for _ in range(rows)]
        ids = torch.tensor([ids for ids, _ in pairs])
        weights = torch.tensor([weights for _, weights in pairs])
        return ids[:, :-1], ids[:, 1:], weights[:, 1:]
