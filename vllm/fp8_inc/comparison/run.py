# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``vllm kv-scales compare``: what the FP8 cache costs a model."""

import argparse
import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.fp8_inc.comparison import tasks, text
from vllm.fp8_inc.comparison.arms import REFERENCE, arm_options, parse_arms
from vllm.fp8_inc.report import FINDING, FINE, Report, Table, UsageError
from vllm.fp8_inc.sources.folder import Folder
from vllm.fp8_inc.whole_folder import check_writable, new_file
from vllm.logger import init_logger

logger = init_logger(__name__)


def run(args: argparse.Namespace) -> int:
    """Runs the arms one after another; returns 1 where one is worse than bf16.

    Raises:
        UsageError: For arms, tasks or texts that there are not.
    """
    arms = parse_arms(args.arms)
    if bool(args.tasks) == bool(args.text):
        raise UsageError("give one of --tasks and --text")
    if args.tasks:
        tasks.check_lm_eval()
    elif not Path(args.text).is_file():
        raise UsageError(f"--text {args.text}: there is no such file")
    folder = Folder.open(args.model)
    _ = folder.keys  # what cannot be read is known before an engine starts
    if args.output_json:
        check_writable(Path(args.output_json))
    with _work_folder(args) as work:
        results = {arm: _arm(arm, args, folder, work) for arm in arms}
    table = (tasks if args.tasks else text).table(results)
    report = Report("arms", table, _settings(args), _lines(table))
    report.write(args.format)
    if args.output_json:
        _write_json(Path(args.output_json), report)
    worse = "worse" in [row[-1] for row in table.rows]
    return FINDING if worse else FINE


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    versions = {name: version(name) for name in ("vllm", "torch", "transformers")}
    if args.tasks:
        versions["lm_eval"] = version("lm_eval")
    return {
        "model": args.model,
        "device": args.device,
        "tasks": args.tasks,
        "text": args.text,
        "limit": args.limit,
        "seed": 0,
        "versions": versions,
    }


@contextlib.contextmanager
def _work_folder(args: argparse.Namespace) -> Iterator[Path]:
    """--work-dir, or one that is gone afterwards."""
    if args.work_dir is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    path = Path(args.work_dir)
    check_writable(path / "arm")
    yield path


def _arm(arm: str, args: argparse.Namespace, folder: Folder, work: Path) -> Any:
    """Runs an arm, unless the work folder has it."""
    digest = _digest(args, folder)
    done = work / f"{arm}-{digest}.json"
    if done.exists():
        logger.info("kv-scales: %s: done before (%s)", arm, done)
        return json.loads(done.read_text())
    known = folder.text_config.get("max_position_embeddings") or args.max_model_len
    options = arm_options(arm, folder, args.device, work) | {
        "max_model_len": min(args.max_model_len, known),
        "tensor_parallel_size": args.tensor_parallel_size,
        "trust_remote_code": args.trust_remote_code,
    }
    logger.info("kv-scales: %s: %s", arm, options)
    if args.tasks:
        result: Any = tasks.run_arm(args.model, options, args.tasks, args.limit)
    else:
        is_reference = arm == REFERENCE
        kept = work / f"hidden-{digest}"
        result = text.run_arm(
            args.model, options, args.text, args.limit or 10**9, kept, is_reference
        )
    with new_file(done) as part:
        part.write_text(json.dumps(result))
    return result


def _digest(args: argparse.Namespace, folder: Folder) -> str:
    """Tells apart what an arm was run with; shards by size and time."""
    shards = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.shards]
    data = Path(args.text).read_text() if args.text else _contents(args.tasks)
    settings = [str(folder.path.resolve()), folder.config, shards, data]
    settings += [args.limit, args.device, args.max_model_len, args.tensor_parallel_size]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _contents(names: str) -> list[str]:
    """Tasks by name, or by what their file says."""
    files = map(Path, names.split(","))
    return [f.read_text() if f.is_file() else str(f) for f in files]


def _lines(table: Table) -> list[str]:
    lines = []
    for row in table.records:
        if row["verdict"] == "reference" or row.get("ci95") is None:
            continue
        name = f"{row['arm']}, {row.get('metric', 'negative log-likelihood')}"
        change = row.get("difference", row.get("nll_difference"))
        lines.append(
            f"{name}: {row['verdict']} ({change:+.4g} ± {row['ci95']:.2g} against "
            f"{REFERENCE})"
        )
    return lines


def _write_json(path: Path, report: Report) -> None:
    with new_file(path) as part, part.open("w") as file:
        report.write("json", file)
