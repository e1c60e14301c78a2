# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Perplexity, divergence and agreement on texts."""

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from vllm.fp8_inc.calibration.prompts import read_rows, token_ids
from vllm.fp8_inc.comparison.forced import ForcedWorker
from vllm.fp8_inc.comparison.statistics import paired, recovery
from vllm.fp8_inc.engine import engine
from vllm.fp8_inc.report import Table

COLUMNS = (
    *("arm", "texts", "tokens", "perplexity", "nll_difference", "ci95", "recovery_pct"),
    *("kl_mean", "kl_p99", "top1_agreement_pct", "verdict"),
)


def run_arm(
    model: str,
    options: dict[str, Any],
    text: str,
    limit: int,
    kept: Path,
    is_reference: bool,
) -> list[dict[str, list[float]]]:
    """Runs the texts one by one; returns what the worker measured of each.

    Args:
        model: The checkpoint.
        options: Of the engine.
        text: A .txt or .jsonl.
        limit: Texts at most.
        kept: Folder of the reference's hidden states; written by the reference.
        is_reference: Whether this is it.
    """
    from tqdm import tqdm

    from vllm import SamplingParams

    worker = f"{ForcedWorker.__module__}.{ForcedWorker.__qualname__}"
    length = options["max_model_len"]
    rows = read_rows(text, limit)
    parameters = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    with engine(
        model,
        **options,
        max_num_seqs=1,
        max_num_batched_tokens=max(length, 2048),
        worker_extension_cls=worker,
    ) as llm:
        prompts = token_ids(rows, llm.get_tokenizer(), length - 1)
        prompts = [prompt for prompt in prompts if len(prompt) > 1]
        llm.collective_rpc("kv_forced_start")
        results = []
        for n, prompt in enumerate(
            tqdm(prompts, desc="compare", unit="text", file=sys.stderr)
        ):
            llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
            path = str(kept / f"{n}.safetensors")
            files = (path, None) if is_reference else (None, path)
            workers = llm.collective_rpc("kv_forced_take", args=(prompt, *files))
            found = next(found for found in workers if found["nll"])
            _check_finite(found["nll"], f"{text}, text {n + 1}")
            results.append(found)
        llm.collective_rpc("kv_forced_stop")
    return results


def table(arms: dict[str, list[dict[str, list[float]]]]) -> Table:
    """One row an arm, each against the first.

    The interval is over texts, since the tokens of a text are not independent.
    """
    reference = next(iter(arms.values()))
    rows = []
    for name, results in arms.items():
        tokens = [x for text in results for x in text["nll"]]
        perplexity = math.exp(statistics.fmean(tokens))
        first = [len(results), len(tokens), perplexity]
        if results is reference:
            rows.append(
                (name, *first, None, None, 100.0, None, None, None, "reference")
            )
            continue
        difference = paired(_means(results), _means(reference))
        before = math.exp(statistics.fmean(x for t in reference for x in t["nll"]))
        divergence = sorted(x for text in results for x in text["kl"])
        same = statistics.fmean(x for text in results for x in text["same"])
        rows.append(
            (
                *(name, *first, difference.mean, difference.half_width),
                recovery(perplexity, before, higher_is_better=False),
                statistics.fmean(divergence),
                divergence[math.ceil(0.99 * len(divergence)) - 1],
                100 * same,
                difference.verdict(higher_is_better=False),
            )
        )
    return Table(COLUMNS, rows)


def _check_finite(nll: list[float], where: str) -> None:
    bad = [n for n, x in enumerate(nll) if not math.isfinite(x)]
    if bad:
        raise ValueError(
            f"{where}: the model gives no probability to token {bad[0] + 2} of "
            f"{len(nll) + 1} ({nll[bad[0]]}). Look at the weights and, where bf16 is "
            "well, at the scales (`vllm kv-scales inspect`)"
        )


def _means(results: list[dict[str, list[float]]]) -> list[float]:
    return [statistics.fmean(text["nll"]) for text in results]
