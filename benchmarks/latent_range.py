# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Where unit, k-only and calibrated scales end up when the latent's range moves.

The embedded bf16 model with its latent times powers of two (benchmarks/rescaled.py):
a bf16 cache gives the same results bit for bit, which is checked; an FP8 cache does
not. The arms run as benchmarks/live.py says: teacher-forced divergence and perplexity
for all of them, greedy accuracy for some.

Example:
    python -m benchmarks.latent_range --texts 30 --questions 200
"""

import argparse
import json
import random
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.embedded import BF16, FP8, LONGEST_ANSWER, ROOT, questions
from benchmarks.live import Result, figures, forced, options
from benchmarks.record import RESULTS, Record, rounded, small_and_quiet
from benchmarks.rescaled import Rescaling, rescale

CALIBRATION = ROOT / "examples" / "calibration-texts.jsonl"
MADE_FOR = 240.0  # the scales of the embedded FP8 model
DEVICES = ("gaudi2", "gaudi3")
SCALES = ("unit", "k-only", "calibrated")
# kv_c has an amax of 0.02, 0.12, 0.7 and 6.1 by layer and k_pe some ten times as
# much: what was published of one DeepSeek model.
PUBLISHED = Rescaling((-7, -5, -3, 0), (-7, -5, -3, 0))
ROW, KV_C = (-12, 9, -10, -6, 6, -14), (-10, 9, -6)
# Answers take most of the time: Gaudi2 is the device with less range.
ASKED, ASKED_ON = ("row 2^-12", "row 2^9", "published"), "gaudi2"


def rescalings() -> dict[str, Rescaling]:
    """The models of the experiment, by name."""
    found = {"as trained": Rescaling((0,) * 4, (0,) * 4)}
    found |= {f"row 2^{e}": Rescaling((e,) * 4, (e,) * 4) for e in ROW}
    found |= {f"kv_c 2^{e}": Rescaling((e,) * 4, (0,) * 4) for e in KV_C}
    return found | {"published": PUBLISHED}


def held_out_texts(count: int, seed: int) -> list[str]:
    """Two solved problems and a held-out one with its solution."""
    questions(0, 0, 0)  # puts the generator on the path
    from documents import few_shot_prompt

    rng = random.Random(seed)
    drawn = [few_shot_prompt(rng, 2) for _ in range(count)]
    return [(prompt + problem.completion).strip() for prompt, problem in drawn]


def expanded_key_amax() -> list[tuple[float, float]]:
    """Of each layer's keys as attention sees them, over all heads: k_nope and k_pe.

    What a producer measures who knows nothing of the latent. A rescaling of kv_c does
    not change k_nope, one of k_pe moves k_pe.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BF16)
    model = AutoModelForCausalLM.from_pretrained(BF16, dtype=torch.float32)
    amax = [(0.0, 0.0)] * model.config.num_hidden_layers
    nope = model.config.qk_nope_head_dim
    for line in CALIBRATION.read_text().splitlines()[:24]:
        ids = tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            cache = model(ids[:, :1024], use_cache=True).past_key_values
        for n, layer in enumerate(cache.layers):
            parts = (layer.keys[..., :nope], layer.keys[..., nope:])
            seen = (part.abs().max().item() for part in parts)
            amax[n] = tuple(map(max, amax[n], seen))
    return amax


def cached_amax(rescaling: Rescaling) -> list[float]:
    """Of each layer's cached row, as calibrating the rescaled model would find it.

    From the calibrated scales of the embedded FP8 model: k covers the row, where k_pe
    is the larger part, v covers kv_c. Powers of two move both exactly.
    """
    from safetensors.torch import load_file

    tensors = load_file(FP8 / "model.safetensors")
    amax = []
    for n, (a, b) in enumerate(zip(rescaling.kv_c, rescaling.k_pe)):
        of = {
            role: tensors[f"model.layers.{n}.self_attn.{role}_scale"].item() * MADE_FOR
            for role in "kv"
        }
        amax.append(max(of["k"] * 2.0**b, of["v"] * 2.0**a))
    return amax


def dequant_scales(
    name: str, device: str, rescaling: Rescaling, keys: list[tuple[float, float]]
) -> list[float]:
    """Of each layer, for one of unit, k-only and calibrated."""
    from vllm.fp8_inc.formats import FORMATS

    if name == "unit":
        return [1.0] * len(keys)
    if name == "k-only":
        moved = zip(keys, rescaling.k_pe, strict=True)
        amax = [max(k_nope, k_pe * 2.0**b) for (k_nope, k_pe), b in moved]
    else:
        amax = cached_amax(rescaling)
    return [a / FORMATS[device].max for a in amax]


def answers(llm: Any, asked: list[tuple[str, int]]) -> list[bool]:
    """Which questions the engine gets right, greedily."""
    from problems import grade

    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER)
    outputs = llm.generate([prompt for prompt, _ in asked], greedy, use_tqdm=False)
    return [
        grade(output.outputs[0].text, answer)
        for output, (_, answer) in zip(outputs, asked, strict=True)
    ]


class Experiment:
    """Runs the models one after another.

    Args:
        args: The command line.
        work: A folder for checkpoints and hidden states.
    """

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        from transformers import AutoTokenizer

        names = ("texts", "questions", "shots", "seed")
        settings = {name: getattr(args, name) for name in names}
        self.record = Record(args.out, {"model": BF16.name} | settings)
        self.work = work
        tokenizer = AutoTokenizer.from_pretrained(BF16)
        self.texts = [
            tokenizer.encode(text) for text in held_out_texts(args.texts, args.seed)
        ]
        self.asked = questions(args.questions, args.shots, args.seed)
        self.keys = expanded_key_amax()

    def run(self) -> None:
        """Measures what the result file lacks."""
        from vllm.fp8_inc.engine import engine

        self.plain = self._bf16(BF16)
        with engine(str(BF16), max_num_seqs=32, **options(False)) as llm:
            self.base = forced(llm, self.texts, self.work, reference=True)
            self.right = answers(llm, self.asked)
        shown = {"right": sum(self.right) / len(self.right)}
        self.record.add("unquantised cache", rounded(shown))
        for name, rescaling in rescalings().items():
            self._check_equal(name, rescaling)
        # A row times 2^e with scale s is the trained row with scale s / 2^e, bit for
        # bit (tests/test_benchmarks.py): one engine serves all of them.
        rows = {n: r for n, r in rescalings().items() if r.is_uniform}
        self._models(BF16, rows)
        for name, rescaling in rescalings().items():
            if name not in rows:
                model = rescale(BF16, self.work / name.replace(" ", "_"), rescaling)
                self._models(model, {name: rescaling})

    def _models(self, served: Path, models: dict[str, Rescaling]) -> None:
        """Runs the arms of models that one checkpoint stands for."""
        from vllm.fp8_inc.engine import engine

        done: dict[tuple, dict[str, float]] = {}
        with engine(str(served), max_num_seqs=32, **options(True)) as llm:
            for name, scales, device in product(models, SCALES, DEVICES):
                row = f"{name}, {scales}, {device}"
                if row in self.record:
                    continue
                rescaling = models[name]
                shift = rescaling.kv_c[0] if served == BF16 else 0
                found = dequant_scales(scales, device, rescaling, self.keys)
                each = [[s / 2.0**shift] for s in found]
                ask = name in ASKED and device == ASKED_ON
                same = (str(each), device, ask)
                if same not in done:
                    llm.collective_rpc("kv_set", args=(device, each, each))
                    done[same] = self._arm(llm, ask)
                self.record.add(row, rounded(done[same]))
                print(row, done[same], flush=True)

    def _check_equal(self, name: str, rescaling: Rescaling) -> None:
        """A bf16 cache must give the results of the trained model, bit for bit.

        In the engine where questions are asked, as a start takes its time.
        """
        if name not in ASKED:
            return
        model = rescale(BF16, self.work / f"{name}-check", rescaling)
        if self._bf16(model) != self.plain:
            raise RuntimeError(f"{name}: a bf16 cache gives other results")

    def _bf16(self, model: Path) -> list[list[float]]:
        """nll of some texts, in bf16 with a bf16 cache."""
        from vllm.fp8_inc.engine import engine

        folder = self.work / "bf16"
        plain = options(False) | {"dtype": "bfloat16"}
        with engine(str(model), max_num_seqs=1, **plain) as llm:
            return forced(llm, self.texts[:3], folder, reference=True)["nll"]

    def _arm(self, llm: Any, ask: bool) -> dict[str, float]:
        from vllm.fp8_inc.comparison.statistics import paired

        result: Result = forced(llm, self.texts, self.work, reference=False)
        shown = figures(result, self.base)
        if ask:
            right = answers(llm, self.asked)
            pairs = paired(right, self.right)
            shown["right"] = sum(right) / len(right)
            shown["right_difference"] = pairs.mean
            shown["right_ci95"] = pairs.half_width
        return shown


def main() -> None:
    """Measures, and prints each arm as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=30)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--out", type=Path, default=RESULTS / "latent-range.json")
    args = parser.parse_args()
    small_and_quiet()
    with tempfile.TemporaryDirectory() as folder:
        Experiment(args, Path(folder)).run()


if __name__ == "__main__":
    main()
