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

Row = tuple[str, dict[str, Any]]  # where it stands, and what


def read_rows(dataset: str, number: int) -> list[Row]:
    """Reads up to ``number`` texts.

    Args:
        dataset: A .jsonl with "text", "prompt" or "messages" a line; a .txt with a
            text a line; or the name of a data set on the hub, perhaps with its
            split as NAME:SPLIT.
        number: At most.

    Raises:
        UsageError: If there is no such data set.
        ValueError: For a line without text, or if there is none.
    """
    rows = list(islice(_rows(dataset), number))
    if not rows:
        raise ValueError(f"{dataset} has no text")
    for row in rows:
        _check_row(*row)
    return rows


def token_ids(rows: list[Row], tokenizer: Any, longest: int) -> list[list[int]]:
    """Turns texts into prompts of at most ``longest`` tokens.

    Args:
        rows: As ``read_rows`` gave them.
        tokenizer: Of the model; "messages" go through its chat template.
        longest: In tokens.

    Raises:
        ValueError: If all are empty.
    """
    prompts = [_token_ids(row, tokenizer, longest)[:longest] for _, row in rows]
    prompts = [ids for ids in prompts if ids]
    if not prompts:
        raise ValueError(f"{rows[0][0]} to {rows[-1][0]}: there is no text")
    return prompts


def _rows(dataset: str) -> Iterator[Row]:
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


def _rows_of_the_hub(dataset: str) -> Iterator[Row]:
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
        raise UsageError(
            f"--dataset {dataset}: {error}; or give a .jsonl or .txt file"
        ) from None
    for number, row in enumerate(rows):
        yield f"{dataset}, row {number}", row


def _token_ids(row: dict[str, Any], tokenizer: Any, longest: int) -> list[int]:
    cut = {"truncation": True, "max_length": longest}
    if isinstance(row.get("messages"), list):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False, **cut)
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
