# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""GB/s at which FP8 weights made for 448 become valid on Gaudi2, on one core.

python -m benchmarks.weight_conversion compares the table of layers/halving.py, with
its search for codes above 240, with a round trip through float32. Both run in one
process, in turn; the ratio is the median of the ratios of each turn.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.formats import GAUDI2, GAUDI3
from vllm.fp8_inc.layers.weights import fit_weight

CONVERT = Adjustment(GAUDI3, GAUDI2, "benchmark")
KEEP = Adjustment(GAUDI2, GAUDI2, "benchmark")


def round_trip(weight: torch.Tensor) -> torch.Tensor:
    """What the table replaces: convert, halve, round."""
    return (weight.float() * 0.5).to(torch.float8_e4m3fn)


def seconds(run: Callable[[torch.Tensor], object], weight: torch.Tensor) -> float:
    """How long one call takes; the copy it works on is made before."""
    copy = weight.clone()
    start = time.perf_counter()
    run(copy)
    return time.perf_counter() - start


def measure(megabytes: int, turns: int) -> dict[str, float]:
    """Runs every way in turn on the same weight."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(megabytes, 2**20, generator=generator)
    weight = (values / values.abs().max() * 448).to(torch.float8_e4m3fn)
    small = round_trip(weight)
    ways = {
        "table": lambda w: fit_weight(w, CONVERT, "weight"),
        "round trip": round_trip,
        "made for 240": lambda w: fit_weight(w, KEEP, "weight"),
    }
    of = {"table": weight, "round trip": weight, "made for 240": small}
    for name, run in ways.items():
        seconds(run, of[name][:1])
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, run in ways.items():
            times[name].append(seconds(run, of[name]))
    size = weight.numel() / 1e9
    result = {
        f"{name}, GB/s": round(size / statistics.median(taken), 3)
        for name, taken in times.items()
    }
    pairs = zip(times["round trip"], times["table"], strict=True)
    ratio = statistics.median(slow / fast for slow, fast in pairs)
    return result | {"table over round trip": round(ratio, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    print(json.dumps(measure(args.megabytes, args.turns), indent=1))


if __name__ == "__main__":
    main()
