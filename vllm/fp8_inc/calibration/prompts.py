# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The texts to calibrate on."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.fp8_inc.report import UsageError
from vllm.fp8_inc.sources.strict_json import parse_json

_LOCAL = (".jsonl", ".txt")
_TEXTS = ("text", "prompt")


def read_prompts(
    dataset: str, tokenizer: Any, number: int, longest: int
) -> list[list[int]]:
    """Reads up to ``number`` prompts as token ids, cut to ``longest``.

    Args:
        dataset: A .jsonl with "text", "prompt" or "messages" a line; a .txt with a
            text a line; or the name of a data set on the hub, perhaps with its
            split as NAME:SPLIT.
        tokenizer: Of the model; "messages" go through its chat template.
        number: At most.
        longest: In tokens.

    Raises:
        UsageError: If there is no such data set.
        ValueError: For a line that is none of these, or if nothing is left.
    """
    prompts = []
    for where, row in islice(_rows(dataset), number):
        ids = _token_ids(where, row, tokenizer, longest)[:longest]
        if ids:
            prompts.append(ids)
    if not prompts:
        raise ValueError(f"{dataset} has no text")
    return prompts


def check_dataset(dataset: str, number: int) -> None:
    """Reads the first ``number`` lines of a local file, before a model is loaded.

    Raises:
        UsageError: If there is no such file.
        ValueError: For a line that is none of those that ``read_prompts`` takes.
    """
    if Path(dataset).suffix not in _LOCAL:
        return
    for where, row in islice(_rows(dataset), number):
        _check_row(where, row)


def _rows(dataset: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(dataset)
    if path.suffix not in _LOCAL:
        yield from _rows_of_the_hub(dataset)
        return
    if not path.is_file():
        raise UsageError(f"--dataset {dataset}: there is no such file")
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            where = f"{dataset}, line {number}"
            if not line.strip():
                continue
            yield (
                where,
                _parsed(where, line)
                if path.suffix == ".jsonl"
                else {"text": line.rstrip("\n")},
            )


def _parsed(where: str, line: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f'{where} is {row!r}; expected is {{"text": "..."}}')
    return row


def _rows_of_the_hub(dataset: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UsageError(
            f"--dataset {dataset}: names need the package datasets "
            "(pip install 'vllm[kv-scales]'); or give a .jsonl or .txt file"
        ) from None
    name, _, split = dataset.partition(":")
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:
        raise UsageError(f"--dataset {dataset}: {error}") from None
    for number, row in enumerate(rows):
        yield f"{dataset}, row {number}", row


def _token_ids(
    where: str, row: dict[str, Any], tokenizer: Any, longest: int
) -> list[int]:
    cut = {"truncation": True, "max_length": longest}
    if isinstance(row.get("messages"), list):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False, **cut)
    _check_row(where, row)
    text = next(row[name] for name in _TEXTS if isinstance(row.get(name), str))
    return tokenizer.encode(text, **cut)


def _check_row(where: str, row: dict[str, Any]) -> None:
    texts = [row.get(name) for name in _TEXTS]
    if isinstance(row.get("messages"), list) or any(isinstance(t, str) for t in texts):
        return
    raise ValueError(
        f"{where} has the keys {sorted(row)}; expected is "
        '"text", "prompt" or "messages"'
    )
