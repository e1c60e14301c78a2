# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The table of the original request, on the embedded FP8 model.

lm-eval's task examples/tasks/word-problems.yaml, 1,319 problems whose numbers no
training problem has together, with a bf16 cache, unit scales and loaded scales, on
both devices; every arm against bf16, whose FP8 weights have the same device's numbers,
question by question. Beside it, teacher-forced on problems with their solutions:
perplexity and divergence.

Example:
    python -m benchmarks.request_table --limit 400
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.embedded import FP8, ROOT
from benchmarks.record import RESULTS, Record, rounded, small_and_quiet

TASKS = ROOT / "examples" / "tasks"
DEVICES = ("gaudi2", "gaudi3")
ARMS = ("fp8-unit", "fp8-loaded")
MAX_MODEL_LEN = 1024


def solved_texts(folder: Path, count: int) -> Path:
    """Problems with their solutions, four a text."""
    lines = (TASKS / "problems.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    each = [f"Question: {row['question']}\nAnswer:{row['answer']}" for row in rows]
    texts = ["\n\n".join(each[n : n + 4]) for n in range(0, 4 * count, 4)]
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def run_arm(
    arm: str, device: str, args: argparse.Namespace, work: Path, texts: Path
) -> dict[str, Any]:
    """lm-eval's rows of an arm, and what the texts say."""
    from vllm.fp8_inc.comparison import tasks, text
    from vllm.fp8_inc.comparison.arms import REFERENCE, arm_options
    from vllm.fp8_inc.sources.folder import Folder

    options = arm_options(arm, Folder.open(str(FP8)), device, work)
    options["max_model_len"] = MAX_MODEL_LEN
    task = str(TASKS / "word-problems.yaml")
    # The shots are the same for all questions: cached once, prefilled once.
    cached = options | {"enable_prefix_caching": True, "max_num_seqs": 64}
    found = tasks.run_arm(str(FP8), cached, task, args.limit)
    is_reference = arm == REFERENCE
    kept = work / "hidden"
    forced = text.run_arm(str(FP8), options, str(texts), 10**9, kept, is_reference)
    return {"rows": found["rows"], "forced": forced}


def figures(result: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """What is shown of an arm; intervals are half of 95 %."""
    from vllm.fp8_inc.comparison import text
    from vllm.fp8_inc.comparison.statistics import paired

    shown: dict[str, float] = {}
    for row, before in zip(result["rows"], base["rows"], strict=True):
        name = row["filter"]
        pairs = paired(row["answers"], before["answers"])
        shown[name] = row["value"]
        shown[f"{name} stderr"] = row["stderr"]
        shown[f"{name} difference"] = pairs.mean
        shown[f"{name} ci95"] = pairs.half_width
    arms = {"base": base["forced"], "arm": result["forced"]}
    forced = text.table(arms).records[-1]
    shown["perplexity"] = forced["perplexity"]
    if result is not base:
        names = ("kl_mean", "top1_agreement_pct", "nll_difference", "ci95")
        shown |= {f"forced {name}": forced[name] for name in names}
    return rounded(shown)


def run(args: argparse.Namespace, work: Path) -> None:
    """Runs all arms."""
    from importlib.metadata import version

    from vllm.fp8_inc.comparison.arms import REFERENCE

    settings = {
        "model": FP8.name,
        "task": "word-problems",
        "questions": args.limit or 1319,
        "shots": 3,
        "texts": args.texts,
        "seed": 0,
        "lm_eval": version("lm_eval"),
    }
    record = Record(args.out, settings)
    texts = solved_texts(work, args.texts)
    for device in DEVICES:
        base = run_arm(REFERENCE, device, args, work, texts)
        record.add(f"{REFERENCE}, {device}", figures(base, base))
        for arm in ARMS:
            result = run_arm(arm, device, args, work, texts)
            record.add(f"{arm}, {device}", figures(result, base))
            print(arm, device, record.rows[f"{arm}, {device}"], flush=True)


def main() -> None:
    """Measures, and prints each arm as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="questions (default: all 1,319)")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "request-table.json")
    args = parser.parse_args()
    small_and_quiet()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    main()
