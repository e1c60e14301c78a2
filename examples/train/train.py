# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Trains the model. One thread, fixed seed, a schedule in steps.

In fp32: without a CPU's own bf16 instructions autocast is ten times slower.

Example:
    OMP_NUM_THREADS=1 python train.py WORK_DIR

WORK_DIR receives `train.log`, `tokenizer/` and `weights.safetensors`.
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
from safetensors.torch import save_file
from tokenizer import build_tokenizer

SEED = 0
MUON_LR = 0.02
ADAM_LR = 3e-3
WARMUP_STEPS = 60
BALANCE_LOSS = 0.01
LOG_EVERY = 100
SAVE_EVERY = 250


@dataclass(frozen=True)
class Stage:
    """A number of steps whose batches take the (rows, tokens) shapes in turn."""

    steps: int
    shapes: tuple[tuple[int, int], ...]


# The second stage trains the positions up to 1,023, and keeps short sequences
# so that questions without shots remain common.
STAGES = (
    Stage(1000, ((6, 384),)),
    Stage(500, ((2, 1024), (6, 384))),
)
TOTAL_STEPS = sum(stage.steps for stage in STAGES)
DECAY_FROM = 0.55  # share of the steps at the full rate
FINAL_RATE = 0.02


def rate(step: int) -> float:
    """Learning rate factor: warm-up, constant, linear decay."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    left = (1 - step / TOTAL_STEPS) / (1 - DECAY_FROM)
    return warm * min(1.0, max(FINAL_RATE, left))


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


def schedule() -> Iterator[tuple[int, int]]:
    """Yields the rows and tokens of each step's batch."""
    for stage in STAGES:
        for index in range(stage.steps):
            yield stage.shapes[index % len(stage.shapes)]


def save(model: TrainingModel, path: Path) -> None:
    """Writes the weights beside, then renames."""
    part = path.with_name(path.name + ".part")
    save_file(model.state_dict(), part)
    os.replace(part, path)


def train(out: Path) -> None:
    """Runs the schedule.

    Args:
        out: Directory for the log, the tokenizer and the weights.
    """
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    config = ModelConfig()
    tokenizer = build_tokenizer(config.max_positions)
    tokenizer.save_pretrained(out / "tokenizer")
    source = BatchSource(tokenizer, SEED + 1)
    model = TrainingModel(config)
    muon, adam = make_optimizers(model)
    # Two batch shapes mean two compiled graphs, each with fixed sizes.
    forward = torch.compile(model, dynamic=False)
    log = (out / "train.log").open("w")

    def report(text: str) -> None:
        print(text, flush=True)
        print(text, file=log, flush=True)

    parameters = sum(p.numel() for p in model.parameters())
    report(f"seed {SEED}, {parameters} parameters, {TOTAL_STEPS} steps")
    for stage in STAGES:
        report(f"stage of {stage.steps} steps, (rows, tokens): {stage.shapes}")
    tokens, digit_loss, start = 0, 0.0, time.monotonic()
    for step, (rows, length) in enumerate(schedule()):
        loss, digits = weighted_loss(model, forward, source.batch(rows, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = ADAM_LR * rate(step)
        adam.step()
        muon.step(MUON_LR * rate(step))
        model.zero_grad(set_to_none=True)
        tokens += rows * length
        digit_loss += (digits - digit_loss) * (0.05 if step else 1.0)
        done = step + 1
        if done % LOG_EVERY == 0 or done == TOTAL_STEPS:
            report(
                f"step {done}, {time.monotonic() - start:.0f} s, "
                f"{tokens / 1e6:.2f} M tokens, rate {rate(step):.3f}, "
                f"result digit loss {digit_loss:.4f}"
            )
        if done % SAVE_EVERY == 0 or done == TOTAL_STEPS:
            save(model, out / "weights.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory for log and weights")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.out)


if __name__ == "__main__":
    main()
