# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the FP8 cache costs the embedded model: arms on the same questions.

Greedy answers of the vLLM engine on held-out word problems; each arm against the
first, question by question.

Example:
    python -m benchmarks.accuracy --count 400 --shots 3
"""

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import small_and_quiet

ROOT = Path(__file__).parents[1]
BF16 = ROOT / "examples" / "tiny-deepseek-v2"
FP8 = ROOT / "examples" / "tiny-deepseek-v2-fp8"
LONGEST_ANSWER = 90  # tokens


def without_scales(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint that declares no KV scheme and holds no KV scales."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(model, folder / "unit")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (copy / "config.json").write_text(json.dumps(config))
    tensors = load_file(copy / "model.safetensors")
    tensors = {k: t for k, t in tensors.items() if ".self_attn.k_scale" not in k}
    tensors = {k: t for k, t in tensors.items() if ".self_attn.v_scale" not in k}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def questions(count: int, shots: int, seed: int) -> list[tuple[str, int]]:
    """Few-shot prompts and their answers, from the held-out side of the split."""
    sys.path.insert(0, str(ROOT / "examples" / "train"))
    from documents import few_shot_prompt

    rng = random.Random(seed)
    drawn = [few_shot_prompt(rng, shots) for _ in range(count)]
    return [(prompt, problem.answer) for prompt, problem in drawn]


def answers(model: Path, options: dict[str, Any], prompts: list[str]) -> list[str]:
    """The engine's greedy completions."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(str(model), enforce_eager=True, max_num_seqs=32, **options)
    parameters = SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER)
    results = llm.generate(prompts, parameters, use_tqdm=False)
    texts = [result.outputs[0].text for result in results]
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return texts


def main() -> None:
    """Runs the arms and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--shots", type=int, default=3)
    parser.add_argument("--seed", type=int, default=12345)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    small_and_quiet()

    drawn = questions(args.count, args.shots, args.seed)
    from problems import grade

    def fp8_cache(device: str) -> dict[str, Any]:
        extra = {"fp8_inc": {"device": device}}
        return {"kv_cache_dtype": "fp8_inc", "additional_config": extra}

    with tempfile.TemporaryDirectory() as folder:
        unit = without_scales(FP8, Path(folder))
        arms = [
            ("bf16 weights, bf16 KV", BF16, {}),
            ("FP8 weights, bf16 KV", FP8, {}),
            ("FP8 weights, fp8_inc, Gaudi3", FP8, fp8_cache("gaudi3")),
            ("FP8 weights, fp8_inc, Gaudi2", FP8, fp8_cache("gaudi2")),
            ("FP8 weights, fp8_inc, unit scales, Gaudi3", unit, fp8_cache("gaudi3")),
        ]
        import torch
        import transformers

        from vllm.version import __version__

        print(
            f"n {args.count}, {args.shots} shots, seed {args.seed}, greedy; vLLM "
            f"{__version__}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}\n"
        )
        print("| arm | right | difference to the first (95 %) | same text |")
        print("|---|---|---|---|")
        base_texts: list[str] = []
        base_right: list[bool] = []
        for name, model, options in arms:
            texts = answers(model, options, [prompt for prompt, _ in drawn])
            right = [
                grade(text, answer)
                for text, (_, answer) in zip(texts, drawn, strict=True)
            ]
            base_texts, base_right = base_texts or texts, base_right or right
            pairs = [a - b for a, b in zip(right, base_right, strict=True)]
            error = 1.96 * statistics.stdev(pairs) / len(pairs) ** 0.5
            same = statistics.mean(map(str.__eq__, texts, base_texts))
            print(
                f"| {name} | {statistics.mean(right):.4f} | "
                f"{statistics.mean(pairs):+.4f} ± {error:.4f} | {same:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
