# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Our engine against transformers with ml_dtypes, log-probability by log-probability.

The embedded FP8 model in float32, where both compute the same but for the order of
sums; tests/oracle.py shares no code with the engine. Quantiles of the absolute
difference over all positions of held-out problems with their solutions.

Example:
    python -m benchmarks.differential --prompts 1000
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.embedded import FP8, ROOT
from benchmarks.record import RESULTS, Record, rounded, small_and_quiet
from tests.device_numbers import MAXIMUM
from tests.oracle import Oracle

PROBLEMS = ROOT / "examples" / "tasks" / "problems.jsonl"
MADE_FOR = 240.0
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


def prompts(count: int) -> list[list[int]]:
    """Token ids of problems with their solutions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FP8)
    rows = map(json.loads, PROBLEMS.read_text().splitlines()[:count])
    texts = (f"Question: {row['question']}\nAnswer:{row['answer']}" for row in rows)
    return [tokenizer.encode(text) for text in texts]


def loaded_scales(device: str) -> list[float]:
    """Of the latent of each layer: the larger of k and v, adjusted to the device."""
    from safetensors.torch import load_file

    tensors = load_file(FP8 / "model.safetensors")
    keys = ("model.layers.{}.self_attn.{}_scale".format(n, "{}") for n in range(4))
    return [
        max(tensors[key.format(role)].item() for role in "kv")
        * (MADE_FOR / MAXIMUM[device])
        for key in keys
    ]


def served(arm: str, device: str, asked: list[list[int]], work: Path) -> list:
    """The engine's log-probabilities of each token but the first, by prompt."""
    from vllm import SamplingParams
    from vllm.fp8_inc.comparison.arms import arm_options
    from vllm.fp8_inc.engine import engine
    from vllm.fp8_inc.sources.folder import Folder

    options = arm_options(arm, Folder.open(str(FP8)), device, work)
    one = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False
    )
    with engine(str(FP8), dtype="float32", max_num_seqs=1, **options) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in asked]
        results = llm.generate(inputs, one, use_tqdm=False)
    return [
        torch.tensor(
            [
                step[token].logprob
                for step, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)
            ]
        )
        for ids, result in zip(asked, results, strict=True)
    ]


def expected(arm: str, device: str, asked: list[list[int]]) -> list[torch.Tensor]:
    """The oracle's."""
    ones = [1.0] * 4
    scales = {"bf16": None, "fp8-unit": ones, "fp8-loaded": loaded_scales(device)}
    maximum = MAXIMUM[device]
    oracle = Oracle(
        str(FP8),
        latent_scales=scales[arm],
        maximum=maximum,
        factor=MADE_FOR / maximum,
    )
    return [oracle.logprobs(ids) for ids in asked]


def figures(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> dict[str, Any]:
    """Quantiles over positions, and over prompts the share without a rounding tie."""
    each = [(a - b).abs() for a, b in zip(ours, theirs, strict=True)]
    flat = torch.cat(each).double()
    shown = {f"q{q:g}": flat.quantile(q).item() for q in QUANTILES}
    exact = sum(bool(d.max() < 1e-3) for d in each) / len(each)
    return rounded({"positions": len(flat), "prompts below 1e-3": exact, **shown}, 3)


def main() -> None:
    """Measures, and prints each arm as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS / "differential.json")
    args = parser.parse_args()
    small_and_quiet()
    settings = {"model": FP8.name, "prompts": args.prompts, "dtype": "float32"}
    record, asked = Record(args.out, settings), prompts(args.prompts)
    with tempfile.TemporaryDirectory() as folder:
        for device in MAXIMUM:
            for arm in ("bf16", "fp8-unit", "fp8-loaded"):
                if f"{arm}, {device}" in record:
                    continue
                ours = served(arm, device, asked, Path(folder))
                shown = figures(ours, expected(arm, device, asked))
                record.add(f"{arm}, {device}", shown)
                print(arm, device, shown, flush=True)


if __name__ == "__main__":
    main()
