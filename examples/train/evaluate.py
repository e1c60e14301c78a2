# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Greedy accuracy on held-out problems, with transformers.

Example:
    python evaluate.py CHECKPOINT_DIR --shots 0 3 12 --count 200
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from documents import few_shot_prompt
from problems import Problem, grade
from transformers import AutoTokenizer, DeepseekV2ForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import Cache, DynamicCache

LONGEST_ANSWER = 90  # tokens
BATCH = 50


@torch.inference_mode()
def generate(
    model: DeepseekV2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    make_cache: Callable[[], Cache] = DynamicCache,
) -> list[str]:
    """Greedy answers, without the end token, in the order of the prompts."""
    answers = []
    for first in range(0, len(prompts), BATCH):
        inputs = tokenizer(
            prompts[first : first + BATCH], return_tensors="pt", padding=True
        )
        room = model.config.max_position_embeddings - inputs["input_ids"].shape[1]
        out = model.generate(
            **inputs,
            max_new_tokens=min(LONGEST_ANSWER, room),
            do_sample=False,
            past_key_values=make_cache(),
        )
        answers += tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return answers


def evaluation_set(
    tokenizer: PreTrainedTokenizerFast, shots: int, count: int, seed: int
) -> tuple[list[str], list[Problem]]:
    """Draws prompts that leave room for an answer, and their open problems."""
    rng = random.Random(seed)
    longest = tokenizer.model_max_length - LONGEST_ANSWER
    prompts, problems = [], []
    while len(prompts) < count:
        prompt, problem = few_shot_prompt(rng, shots)
        if len(tokenizer(prompt)["input_ids"]) <= longest:
            prompts.append(prompt)
            problems.append(problem)
    return prompts, problems


def report(
    model: DeepseekV2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    shots: int,
    count: int,
    seed: int,
) -> str:
    """Measures one number of shots and returns a line about it."""
    start = time.monotonic()
    prompts, problems = evaluation_set(tokenizer, shots, count, seed)
    answers = generate(model, tokenizer, prompts)
    right = [grade(text, p.answer) for text, p in zip(answers, problems, strict=True)]
    lengths = [len(tokenizer(p)["input_ids"]) for p in prompts]
    parts = []
    for steps in (1, 2, 3):
        of_these = [
            ok for ok, p in zip(right, problems, strict=True) if p.steps == steps
        ]
        parts.append(f"{sum(of_these)}/{len(of_these)}")
    return (
        f"{shots:2d} shots: {sum(right)}/{count} = {sum(right) / count:.3f} right; "
        f"by 1, 2, 3 steps {', '.join(parts)}; prompts of {min(lengths)} to "
        f"{max(lengths)} tokens; seed {seed}; {time.monotonic() - start:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--shots", type=int, nargs="+", default=[0, 3, 12])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="arithmetic; the weights are bf16 values either way",
    )
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = DeepseekV2ForCausalLM.from_pretrained(args.checkpoint, dtype=args.dtype)
    print(f"greedy, weights bf16, arithmetic {args.dtype}")
    for shots in args.shots:
        print(report(model.eval(), tokenizer, shots, args.count, args.seed), flush=True)


if __name__ == "__main__":
    main()
