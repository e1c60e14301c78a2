# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""How much a prefix hit changes an answer of the embedded models.

Each prompt is asked twice, first with an empty prefix cache; what changes is the
log-probability of the answer's first token. A hit's few new tokens attend in latent
space, its single new token is a decode step, and "expanded" is what more tokens do.

Example:
    python -m benchmarks.prefix_hits
"""

import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.embedded import BF16, FP8, questions
from benchmarks.record import (
    RESULTS,
    Record,
    markdown,
    rounded,
    small_and_quiet,
    write_between,
)

PAGE = Path(__file__).parents[1] / "docs/cpu.md"
BLOCK = 16
PROMPTS = 40
FORMS = ("latent space", "decode step", "expanded")


def prompts(form: str) -> list[list[int]]:
    """Token ids whose last block has 2 to 16 tokens, or one for a decode step."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BF16)
    found = []
    for number, (text, _) in enumerate(questions(PROMPTS, shots=3, seed=5)):
        ids = tokenizer(text).input_ids
        whole = len(ids) // BLOCK * BLOCK - BLOCK
        more = 1 if form == "decode step" else 2 + number % (BLOCK - 1)
        found.append(ids[: whole + more])
    return found


def logprob(llm: Any, ids: list[int]) -> tuple[int, float, int]:
    """The first token of the answer, its log-probability, and the tokens that hit."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    (result,) = llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
    (token,) = result.outputs[0].token_ids
    value = result.outputs[0].logprobs[0][token].logprob
    return token, value, result.num_cached_tokens


def measure(llm: Any, ask: list[list[int]]) -> dict[str, float]:
    """Changes over all prompts."""
    changes, tokens = [], 0
    for ids in ask:
        llm.reset_prefix_cache()
        first, before, none = logprob(llm, ids)
        again, after, hit = logprob(llm, ids)
        if none or hit != (len(ids) - 1) // BLOCK * BLOCK:
            raise RuntimeError(f"{none} and {hit} of {len(ids)} tokens were cached")
        tokens += first != again
        if first == again:
            changes.append(abs(after - before))
    figures = {
        "median": statistics.median(changes),
        "mean": statistics.mean(changes),
        "largest": max(changes),
    }
    return rounded(figures, 3) | {"other_tokens": tokens}


def render(rows: dict[str, dict[str, float]]) -> str:
    """The table of docs/cpu.md."""
    head = ["weights, device, form", "median", "mean", "largest", "other tokens"]
    lines = [[name, *map(str, row.values())] for name, row in rows.items()]
    return markdown(head, lines)


def write(results: dict[str, Any]) -> None:
    """Replaces the table of the page."""
    write_between(PAGE, "prefix-hits", render(results["rows"]))


def main() -> None:
    small_and_quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its layers are set here
    from tests.engines import attention_layers, engine

    record = Record(RESULTS / "prefix-hits.json", {"prompts": PROMPTS})
    asked = {form: prompts(form) for form in FORMS}
    for weights, model in (("FP8", FP8), ("bf16", BF16)):
        for device in ("gaudi2", "gaudi3"):
            options = {
                "max_model_len": 1024,
                "block_size": BLOCK,
                "additional_config": {"fp8_inc": {"device": device}},
            }
            with engine(str(model), **options) as llm:
                for form in FORMS:
                    if form == "expanded":
                        for layer in attention_layers(llm):
                            layer.impl._break_even = 0
                    row = measure(llm, asked[form])
                    record.add(f"{weights}, {device}, {form}", row)
                    print(weights, device, form, row, flush=True)
    write({"rows": record.rows})


if __name__ == "__main__":
    main()
