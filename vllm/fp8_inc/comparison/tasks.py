# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""lm-eval's tasks, arm by arm."""

from pathlib import Path
from typing import Any

from vllm.fp8_inc.comparison.statistics import paired, recovery
from vllm.fp8_inc.engine import OPTIONS, alone
from vllm.fp8_inc.report import Table, UsageError

# lm-eval's own, then what a comparison adds.
COLUMNS = (
    *("arm", "tasks", "version", "filter", "n_shot", "metric", "better", "value"),
    *("stderr", "questions", "difference", "ci95", "recovery_pct", "verdict"),
)


def check_lm_eval() -> None:
    """Raises UsageError where lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UsageError(
            "--tasks needs lm-eval: pip install 'lm_eval==0.4.13', or compare on "
            "--text FILE"
        ) from None


def run_arm(
    model: str, options: dict[str, Any], tasks: str, limit: int | None
) -> dict[str, Any]:
    """Evaluates one arm; returns what lm-eval says, with the value of each question.

    Args:
        model: The checkpoint.
        options: Of the engine.
        tasks: Names, or YAML files of tasks, separated by commas.
        limit: Questions of a task at most.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.vllm_causallms import VLLM
    from lm_eval.tasks import TaskManager

    named = [task.strip() for task in tasks.split(",")]
    files = [Path(task) for task in named if task.endswith((".yaml", ".yml"))]
    for file in files:
        if not file.is_file():
            raise UsageError(f"--tasks {file}: there is no such file")
    folders = sorted({str(file.parent.resolve()) for file in files})
    names = [_task_name(Path(t)) if Path(t) in files else t for t in named]
    with alone():
        lm = VLLM(pretrained=model, batch_size="auto", **{**OPTIONS, **options})
        try:
            results = simple_evaluate(
                model=lm,
                tasks=names,
                limit=limit,
                task_manager=TaskManager(include_path=folders or None),
                log_samples=True,
                bootstrap_iters=1000,
            )
        finally:
            del lm.model
    return _kept(results)


def _task_name(file: Path) -> str:
    import re

    found = re.search(r"^task:\s*(\S+)\s*$", file.read_text(), re.M)
    if found is None:
        raise UsageError(f"--tasks {file}: it has no line `task: NAME`")
    return found[1].strip("\"'")


def _kept(results: dict[str, Any]) -> dict[str, Any]:
    """The rows of lm-eval's table, each with its questions' values."""
    rows = []
    for task, metrics in results["results"].items():
        better = results.get("higher_is_better", {}).get(task, {})
        for name, value in metrics.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            answers = {
                sample["doc_id"]: float(sample[metric])
                for sample in results["samples"].get(task, [])
                if sample["filter"] == chosen and _is_number(sample.get(metric))
            }
            error = metrics.get(f"{metric}_stderr,{chosen}")
            rows.append(
                {
                    "task": task,
                    "version": results["versions"].get(task),
                    "filter": chosen,
                    "n_shot": results["n-shot"].get(task),
                    "metric": metric,
                    "higher_is_better": better.get(metric, True),
                    "value": value,
                    "stderr": error if _is_number(error) else None,
                    "answers": [answers[doc] for doc in sorted(answers)],
                }
            )
    return {"rows": rows}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def table(arms: dict[str, dict[str, Any]]) -> Table:
    """lm-eval's rows of each arm, against the first arm's."""
    reference = next(iter(arms.values()))["rows"]
    rows = []
    for name, results in arms.items():
        for row, before in zip(results["rows"], reference, strict=True):
            better = row["higher_is_better"]
            added: list[Any] = [None, None, 100.0, "reference"]
            if row is not before and len(row["answers"]) > 2:
                difference = paired(row["answers"], before["answers"])
                added = [
                    *(difference.mean, difference.half_width),
                    recovery(row["value"], before["value"], better),
                    difference.verdict(better),
                ]
            elif row is not before:
                added = [None, None, None, "no value a question"]
            rows.append(
                (
                    *(name, row["task"], row["version"], row["filter"], row["n_shot"]),
                    *(row["metric"], "higher" if better else "lower", row["value"]),
                    *(row["stderr"], len(row["answers"]), *added),
                )
            )
    return Table(COLUMNS, rows)
