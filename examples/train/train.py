# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Trains the model, in two rounds. One thread, fixed seeds, schedules in steps.

In fp32: without a CPU's own bf16 instructions autocast is ten times slower.

Example:
    OMP_NUM_THREADS=1 python train.py WORK_DIR
    OMP_NUM_THREADS=1 python train.py WORK_DIR --again

WORK_DIR receives `train.log`, `tokenizer/` and `weights.safetensors`. The second round
starts with the weights of the first, on fresh documents, at a lower rate.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import WEIGHT_RESULT, BatchSource
from model import ModelConfig, TrainingModel
from muon import Muon
from safetensors.torch import load_file, save_file
from tokenizer import build_tokenizer

SEED = 0
MUON_LR = 0.02
ADAM_LR = 3e-3
WARMUP_STEPS = 60
FINAL_RATE = 0.02  # of a round, as a share of its largest
BALANCE_LOSS = 0.01
LOG_EVERY = 100
SAVE_EVERY = 250


@dataclass(frozen=True)
class Stage:
    """A number of steps whose batches take the (rows, tokens) shapes in turn."""

    steps: int
    shapes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Round:
    """A schedule.

    Attributes:
        seed: Of the documents; the weights' is SEED.
        rate: The largest factor of the learning rates.
        decay_from: Share of the steps at that rate.
        stages: What its batches are.
    """

    seed: int
    rate: float
    decay_from: float
    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def rate_at(self, step: int) -> float:
        """Factor of the learning rates: warm-up, constant, linear decay."""
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        left = (1 - step / self.steps) / (1 - self.decay_from)
        return self.rate * warm * min(1.0, max(FINAL_RATE, left))

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yields the rows and tokens of each step's batch."""
        for stage in self.stages:
            for index in range(stage.steps):
                yield stage.shapes[index % len(stage.shapes)]


# Long sequences train the positions up to 1,023; short ones stay, so that questions
# without shots remain common.
SHORT, LONG = (6, 384), (2, 1024)
FIRST = Round(SEED + 1, 1.0, 0.55, (Stage(1200, (SHORT,)), Stage(500, (LONG, SHORT))))
AGAIN = Round(SEED + 2, 0.6, 0.0, (Stage(500, (LONG, SHORT)),))


def make_optimizers(model: TrainingModel) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices inside; AdamW for embedding, head, router and norms."""
    inner, outer, norms = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            norms.append(parameter)
        elif any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.")):
            outer.append(parameter)
        else:
            inner.append(parameter)
    groups = [
        {"params": outer, "weight_decay": 0.05},
        {"params": norms, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=ADAM_LR, betas=(0.9, 0.97), fused=True)
    return Muon(inner), adam


def weighted_loss(
    model: TrainingModel,
    forward: Callable,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, float]:
    """Returns the loss and the mean loss of the result digits alone."""
    ids, targets, weights = batch
    hidden, balance = forward(ids)
    logits = model.lm_head(hidden)
    each = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(weights)
    loss = (each * weights).sum() / weights.sum() + BALANCE_LOSS * balance
    return loss, each.detach()[weights == WEIGHT_RESULT].mean().item()


def save(model: TrainingModel, path: Path) -> None:
    """Writes the weights beside, then renames."""
    part = path.with_name(path.name + ".part")
    save_file(model.state_dict(), part)
    os.replace(part, path)


def train(out: Path, again: bool) -> None:
    """Runs a round.

    Args:
        out: Directory for the log, the tokenizer and the weights.
        again: Whether it is the second round, which goes on with the weights there.
    """
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    plan = AGAIN if again else FIRST
    config = ModelConfig()
    tokenizer = build_tokenizer(config.max_positions)
    tokenizer.save_pretrained(out / "tokenizer")
    source = BatchSource(tokenizer, plan.seed)
    model = TrainingModel(config)
    if again:
        model.load_state_dict(load_file(out / "weights.safetensors"))
    muon, adam = make_optimizers(model)
    # Two batch shapes mean two compiled graphs, each with fixed sizes.
    forward = torch.compile(model, dynamic=False)
    log = (out / "train.log").open("a" if again else "w")

    def report(text: str) -> None:
        print(text, flush=True)
        print(text, file=log, flush=True)

    parameters = sum(p.numel() for p in model.parameters())
    report(f"seed {plan.seed}, {parameters} parameters, {plan.steps} steps")
    for stage in plan.stages:
        report(f"stage of {stage.steps} steps, (rows, tokens): {stage.shapes}")
    tokens, digit_loss, start = 0, 0.0, time.monotonic()
    for step, (rows, length) in enumerate(plan.batches()):
        loss, digits = weighted_loss(model, forward, source.batch(rows, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = plan.rate_at(step)
        for group in adam.param_groups:
            group["lr"] = ADAM_LR * rate
        adam.step()
        muon.step(MUON_LR * rate)
        model.zero_grad(set_to_none=True)
        tokens += rows * length
        digit_loss += (digits - digit_loss) * (0.05 if step else 1.0)
        done = step + 1
        if done % LOG_EVERY == 0 or done == plan.steps:
            report(
                f"step {done}, {time.monotonic() - start:.0f} s, "
                f"{tokens / 1e6:.2f} M tokens, rate {rate:.3f}, "
                f"result digit loss {digit_loss:.4f}"
            )
        if done % SAVE_EVERY == 0 or done == plan.steps:
            save(model, out / "weights.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory for log and weights")
    parser.add_argument("--again", action="store_true", help="the second round")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.out, args.again)


if __name__ == "__main__":
    main()
