# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Runs the engine over the prompts and reads the observers."""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.fp8_inc.adjustment import resolve_adjustment
from vllm.fp8_inc.calibration.prompts import Row, read_rows, token_ids
from vllm.fp8_inc.calibration.result import Calibration
from vllm.fp8_inc.calibration.state import State, fingerprint
from vllm.fp8_inc.calibration.unify import growth, unify
from vllm.fp8_inc.calibration.worker import CalibrationWorker, Numbers, qualified_name
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.sources.folder import Folder
from vllm.logger import init_logger

logger = init_logger(__name__)

_BATCH = 16  # prompts a call of the engine
_SAVE_SECONDS = 15.0
_SEARCHED = 8  # prompts that `mse` tries scales on
_SEARCHED_TOKENS = 512


def calibrate(args: argparse.Namespace, folder: Folder) -> Calibration:
    """Runs the engine over the prompts."""
    made_for = args.device
    if folder.quantization:  # its KV scales have the flavour of its weights
        made_for = resolve_adjustment(
            folder.quantization, FORMATS[args.device]
        ).quantised_for.name
    result = Calibration(
        str(folder.path),
        "MLA" if folder.is_mla else "MHA",
        made_for,
        args.method,
        args.granularity,
    )
    rows = read_rows(args.dataset, args.num_prompts)  # before the weights are
    with _engine(args, folder) as llm:
        _measure(llm, args, folder, rows, result)
    return result


def _measure(
    llm: Any,
    args: argparse.Namespace,
    folder: Folder,
    rows: list[Row],
    result: Calibration,
) -> None:
    longest = llm.model_config.max_model_len - 1
    prompts = token_ids(rows, llm.get_tokenizer(), longest)
    options = [args.granularity, args.tensor_parallel_size, longest]
    state = State(fingerprint(args.model, prompts, options))
    if args.resume:
        state = State.load(state_file(Path(args.output_dir)), state.fingerprint)
        logger.info("kv-scales: goes on after %d prompts", state.prompts)
    join = _Join(folder, args.granularity == "head")
    _run(llm, args, prompts, state, join)
    result.prompts, result.tokens = state.prompts, state.tokens
    result.amax = join(_amax(llm))
    for scales in llm.collective_rpc("kv_softmax_scales"):
        result.softmax_scale |= scales
    _check_seen(llm, result.amax, resumed=args.resume)
    result.growth, result.riser = growth(state.before or result.amax, result.amax)
    plain = _scaled(result.amax)
    if args.method == "percentile":
        found = llm.collective_rpc("kv_percentiles", args=(args.percentile,))
        plain = _smaller(plain, _scaled(join(found)))
    elif args.method == "mse":
        _search(llm, prompts, result, join)
        plain = _smaller(plain, _scaled_by_search(result, join, llm))
    result.scaled = plain
    llm.collective_rpc("kv_stop")


@dataclass(frozen=True)
class _Join:
    """Unifies the workers' numbers for one model."""

    folder: Folder
    per_head: bool

    def __call__(self, workers: list[Any]) -> Numbers:
        text = self.folder.text_config
        heads = text["num_attention_heads"]
        kv_heads = text.get("num_key_value_heads") or heads
        found = [(rank, ranks, numbers) for rank, ranks, numbers, *_ in workers]
        return unify(found, heads, kv_heads, self.per_head)


def _engine(args: argparse.Namespace, folder: Folder) -> Any:
    from vllm.fp8_inc.engine import engine

    known = folder.text_config.get("max_position_embeddings") or args.max_model_len
    return engine(
        args.model,
        max_model_len=min(args.max_model_len, known),
        max_num_batched_tokens=max(args.max_model_len, 2048),
        tensor_parallel_size=args.tensor_parallel_size,
        trust_remote_code=args.trust_remote_code,
        worker_extension_cls=qualified_name(CalibrationWorker),
    )


def _run(
    llm: Any,
    args: argparse.Namespace,
    prompts: list[list[int]],
    state: State,
    join: _Join,
) -> None:
    """Runs the prompts that are left, and keeps the state where it can be found."""
    from tqdm import tqdm

    histograms = args.method == "percentile"
    llm.collective_rpc("kv_observe", args=(histograms, state.workers or None))
    path, saved = state_file(Path(args.output_dir)), time.monotonic()
    last_tenth = len(prompts) * 9 // 10
    bar = tqdm(
        total=sum(map(len, prompts)),
        initial=state.tokens,
        unit="token",
        unit_scale=True,
        desc="calibrate",
        file=sys.stderr,
    )
    try:
        while state.prompts < len(prompts):
            stop = min(state.prompts + _BATCH, len(prompts))
            if state.prompts < last_tenth:
                stop = min(stop, last_tenth)
            batch = prompts[state.prompts : stop]
            _generate(llm, batch)
            found = _amax(llm)
            state.workers = [numbers for _, _, numbers, _ in found]
            state.prompts, state.tokens = stop, state.tokens + sum(map(len, batch))
            if stop == last_tenth:
                state.before = join(found)
            bar.update(sum(map(len, batch)))
            if time.monotonic() - saved > _SAVE_SECONDS:
                state.save(path)
                saved = time.monotonic()
    except KeyboardInterrupt:
        state.save(path)
        logger.info("kv-scales: interrupted; --resume goes on")
        raise
    finally:
        bar.close()
    state.save(path)


def _generate(llm: Any, prompts: list[list[int]]) -> None:
    from vllm import SamplingParams

    llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=1, detokenize=False),
        use_tqdm=False,
    )


def _amax(llm: Any) -> list[Any]:
    return llm.collective_rpc("kv_amax")


def _check_seen(llm: Any, amax: Numbers, resumed: bool) -> None:
    for _, _, _, tokens in _amax(llm):
        unseen = [layer for layer, number in tokens.items() if not number]
        if unseen and not resumed:
            raise ValueError(f"{', '.join(unseen)} saw no data: nothing is written")
    for layer, roles in amax.items():
        for role, numbers in roles.items():
            bad = [n for n, x in enumerate(numbers) if not 0 < x < float("inf")]
            if bad:
                raise ValueError(
                    f"{layer}: amax of {role} is {numbers[bad[0]]} (head {bad[0]} of "
                    f"{len(numbers)}): nothing is written. Take more or other texts, "
                    "or look at the weights of this layer"
                )


def _scaled(amax: Numbers) -> Numbers:
    """What is to meet the format's max, by the roles of a checkpoint."""
    result: Numbers = {}
    for layer, roles in amax.items():
        if "kv_c" in roles:
            row = [max(*roles["kv_c"], *roles["k_pe"])]
            result[layer] = {"k": row, "v": roles["kv_c"], "q": roles["q"]}
            result[layer]["q_latent"] = roles["q_latent"]
        else:
            result[layer] = {role: roles[role] for role in ("k", "v", "q")}
    return result


def _smaller(first: Numbers, second: Numbers) -> Numbers:
    return {
        layer: {
            role: list(map(min, numbers, second[layer].get(role, numbers)))
            for role, numbers in roles.items()
        }
        for layer, roles in first.items()
    }


def _search(
    llm: Any, prompts: list[list[int]], result: Calibration, join: _Join
) -> None:
    """Tries scales on whole prompts, one at a time."""
    amax = None if join.per_head else result.amax
    for prompt in prompts[:_SEARCHED]:
        llm.collective_rpc("kv_keep", args=(True,))
        _generate(llm, [prompt[:_SEARCHED_TOKENS]])
        llm.collective_rpc("kv_add_errors", args=(result.made_for, amax))
    llm.collective_rpc("kv_keep", args=(False,))


def _scaled_by_search(result: Calibration, join: _Join, llm: Any) -> Numbers:
    amax = None if join.per_head else result.amax
    workers = llm.collective_rpc("kv_least_errors", args=(amax,))
    best = join(workers)
    result.gain = join([(rank, ranks, gain) for rank, ranks, _, gain, _ in workers])
    result.error = join([(rank, ranks, error) for rank, ranks, *_, error in workers])
    for roles in best.values():
        if "latent" in roles:
            # The row's scale is k's; v, its first part, follows.
            roles["k"] = roles["v"] = roles.pop("latent")
            roles["q_latent"] = roles.pop("q")
    return best


def state_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.calibration.json")
