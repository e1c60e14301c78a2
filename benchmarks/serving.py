# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Servers under the code of ``vllm bench serve``: fp8_inc, bf16, unmodified vllm.

All arms serve the same random weights: attention as DeepSeek-V2-Lite's (16 heads,
latent 512, rope 64), few layers, so that attention is what takes time. Servers run at
once and are asked in turn; a ratio is the median of the ratios of each turn. A server
without work takes no CPU time.

Example:
    python -m benchmarks.stock build/stock
    python -m benchmarks.serving --stock build/stock
    python -m benchmarks.serving_page
"""

import argparse
import contextlib
import io
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import kernels, stock
from benchmarks.api_server import ApiServer
from benchmarks.record import RESULTS, Record, rounded

TOKENIZER = Path(__file__).parents[1] / "examples/tiny-deepseek-v2"
ARMS = ("fp8_inc", "bf16", "stock")
PARTS = ("start", "first token", "cells")
_SHOWN = ("output_throughput", "median_ttft_ms", "median_tpot_ms")


def write_model(folder: Path, layers: int, max_tokens: int) -> Path:
    """Random weights with V2-Lite's attention, and the embedded model's tokenizer."""
    from tests.checkpoints import deepseek_config, weights, write

    config = deepseek_config(
        vocab_size=640,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=max_tokens,
    )
    write(folder, config, weights(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    return folder


class Server(ApiServer):
    """A server of one arm.

    Args:
        arm: One of ARMS.
        args: The command line's.
        work: Folder with the model, for the log and the caches.
        more: Further flags.
    """

    def __init__(
        self, arm: str, args: argparse.Namespace, work: Path, more: list[str]
    ) -> None:
        flags = [
            *["--enforce-eager", "--block-size", "16"],
            *["--max-model-len", str(max(args.contexts) + args.output + 64)],
            *["--max-num-seqs", str(max(args.concurrency)), *more],
        ]
        if arm == "fp8_inc":
            flags += ["--kv-cache-dtype", "fp8_inc"]
        variables = os.environ | {"VLLM_CACHE_ROOT": str(work / "cache")}
        python = sys.executable
        if arm == "stock":
            variables.pop("PYTHONPATH", None)
            python = str(stock.python_of(args.stock))
        log = work / f"{arm}.log"
        super().__init__(work / "model", "model", log, flags, python, variables)

    def tokens_of_cache(self) -> int:
        """What the engine says that its KV cache holds."""
        found = re.search(r"KV cache size: ([\d,]+) tokens", self.log())
        if found is None:
            raise RuntimeError(f"{self.log_file} does not say the size of the KV cache")
        return int(found[1].replace(",", ""))

    def ask(self, context: int, concurrency: int, output: int, seed: int) -> dict:
        """One run of upstream's ``vllm bench serve`` with random prompts."""
        from vllm.benchmarks.serve import add_cli_args, main
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        arguments = [
            *["--base-url", self.url, "--model", "model"],
            *["--tokenizer", str(self.log_file.parent / "model"), "--ignore-eos"],
            *["--dataset-name", "random", "--random-input-len", str(context)],
            *["--random-output-len", str(output), "--seed", str(seed)],
            *["--num-prompts", str(concurrency), "--temperature", "0"],
            *["--max-concurrency", str(concurrency), "--disable-tqdm"],
            *["--ready-check-timeout-sec", "0"],
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            return main(parser.parse_args(arguments))


def kernel_files(work: Path) -> dict[str, int]:
    """The compiled kernels on disk, and when each was written."""
    files = (work / "cache").glob("fp8_inc_kernels/*/**/*.nb?")
    return {str(path): path.stat().st_mtime_ns for path in files}


def starts(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """A start with no compiled kernel on disk, then one that finds them."""
    row = {}
    for name in ("cold", "warm"):
        before = kernel_files(work)
        with Server("fp8_inc", args, work, []) as server:
            ready = kernel_files(work)
            server.ask(min(args.contexts), 1, args.output, seed=0)
            row[f"{name}_seconds"] = round(server.seconds, 1)
            row[f"{name}_compiled"] = len(ready.items() - before.items())
            row[f"{name}_compiled_after_ready"] = len(
                kernel_files(work).items() - ready.items()
            )
    return row


def first_tokens(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Time to first token of a prompt that the prefix cache has not, and has."""
    row: dict[str, Any] = {"turns": args.turns}
    with Server("fp8_inc", args, work, ["--enable-prefix-caching"]) as server:
        for context in args.contexts:
            times = [
                [
                    server.ask(context, 1, args.output, 100 + n)["median_ttft_ms"]
                    for _ in range(2)
                ]
                for n in range(args.turns)
            ]
            for name, values in zip(("new", "known"), zip(*times)):
                row[f"{context}_{name}_ms"] = round(statistics.median(values), 1)
    return row


def cell(
    servers: dict[str, Server], context: int, concurrency: int, args: argparse.Namespace
) -> dict[str, Any]:
    """All arms in turn, with the same prompts."""
    seen: dict[str, list[dict[str, float]]] = {arm: [] for arm in servers}
    for turn in range(args.turns):
        for arm, server in servers.items():
            answer = server.ask(context, concurrency, args.output, turn)
            seen[arm].append({name: answer[name] for name in _SHOWN})
    row: dict[str, Any] = {"turns": args.turns}
    for arm, turns in seen.items():
        medians = {n: statistics.median(turn[n] for turn in turns) for n in _SHOWN}
        row[arm] = rounded(medians, 4)
        if arm != "fp8_inc":
            ratios = (
                ours["output_throughput"] / theirs["output_throughput"]
                for ours, theirs in zip(seen["fp8_inc"], turns)
            )
            row[arm]["fp8_inc_ratio"] = round(statistics.median(ratios), 2)
    return row


def run(args: argparse.Namespace, work: Path) -> None:
    """Measures what the file has not yet."""
    arms = [arm for arm in ARMS if arm != "stock" or args.stock]
    settings = {
        "layers": args.layers,
        "output_tokens": args.output,
        "cpu": kernels.machine()["cpu"],
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "kv_cache_gib": int(os.environ["VLLM_CPU_KVCACHE_SPACE"]),
    }
    record = Record(args.out, settings)
    write_model(work / "model", args.layers, max(args.contexts) + args.output + 64)
    for name, measure in (("start", starts), ("first token", first_tokens)):
        if name in args.parts and name not in record:
            record.add(name, measure(args, work))
            print(name, record.rows[name], flush=True)
    if "cells" not in args.parts:
        return
    with contextlib.ExitStack() as stack:
        plain = ["--no-enable-prefix-caching"]
        servers = {
            arm: stack.enter_context(Server(arm, args, work, plain)) for arm in arms
        }
        space = settings["kv_cache_gib"]
        sizes = {arm: s.tokens_of_cache() // space for arm, s in servers.items()}
        record.add("KV tokens a GiB", sizes)
        print(sizes, flush=True)
        for context in args.contexts:
            for concurrency in args.concurrency:
                name = f"{context} x {concurrency}"
                if name not in record and context * concurrency <= args.most_tokens:
                    record.add(name, cell(servers, context, concurrency, args))
                    print(name, record.rows[name], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", type=Path, help="folder that benchmarks.stock made")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--most-tokens", type=int, default=2**30, help="of a cell")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "serving.json")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    main()
