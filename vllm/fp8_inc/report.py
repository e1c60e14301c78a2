# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a command of ``vllm kv-scales`` writes, and with which exit code it ends."""

import argparse
import contextlib
import csv
import io
import json
import logging
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

FINE, FINDING, USAGE = 0, 1, 2
_WIDEST = 10_000


class UsageError(ValueError):
    """The command line names something that is not there or does not fit."""


@dataclass(frozen=True)
class Table:
    """Rows under names; a row has a cell for each.

    Attributes:
        columns: Names as in JSON and CSV, in lower case with underscores.
        rows: Cells: text, numbers, None, or lists of numbers.
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows as objects."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass
class Report:
    """The result of a command.

    Attributes:
        name: What a row of ``table`` is, in the plural; its key in JSON.
        table: The data; all that CSV shows.
        facts: More results, by key of the JSON.
        lines: What a person reads below the table.
    """

    name: str
    table: Table
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def write(self, form: str, file: IO[str] | None = None) -> None:
        """Writes it as table, json or csv; to stdout unless told otherwise."""
        file = file or sys.stdout
        if form == "json":
            content = {**self.facts, self.name: self.table.records}
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
        elif form == "csv":
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.table.columns)
            writer.writerows([map(_exact, row) for row in self.table.rows])
        else:
            _write_table(self.table, file)
            file.writelines(f"{line}\n" for line in ["", *self.lines])


def _write_table(table: Table, file: IO[str]) -> None:
    """Lines and colours on a terminal, plain columns elsewhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    terminal = file.isatty()
    shown = RichTable(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    for n, column in enumerate(table.columns):
        numbers = any(isinstance(row[n], float | int) for row in table.rows)
        shown.add_column(
            column.replace("_", " "),
            justify="right" if numbers else "left",
            overflow="fold",
        )
    for row in table.rows:
        shown.add_row(*(Text(_short(cell)) for cell in row))
    if terminal:
        Console(file=file).print(shown)
        return
    plain = io.StringIO()
    Console(file=plain, width=_WIDEST, no_color=True, highlight=False).print(shown)
    file.writelines(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines())


def _short(cell: Any) -> str:
    """A cell for people: numbers with four digits, of lists the ends."""
    if cell is None:
        return "-"
    if isinstance(cell, list | tuple):
        return f"{min(cell):.4g} to {max(cell):.4g}" if cell else "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _exact(cell: Any) -> Any:
    """A cell for CSV."""
    if isinstance(cell, list | tuple):
        return " ".join(map(repr, cell))
    return cell


def logs_to_stderr() -> None:
    """Sends vLLM's logs to stderr, here and in the processes that vLLM starts."""
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    import vllm.logger  # noqa: F401 (configures the handlers)

    for handler in logging.getLogger("vllm").handlers:
        if getattr(handler, "stream", None) is sys.stdout:
            handler.setStream(sys.stderr)


def run_command(args: argparse.Namespace) -> int:
    """Runs ``args.run``; returns the exit code."""
    try:
        with _terminated_as_interrupted():
            return pkgutil.resolve_name(args.run)(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return FINDING
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return FINDING
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        number = error.args[0] if error.args else signal.SIGINT
        return 128 + number  # as shells report it


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, from `docker stop` or a scheduler, cleans up as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: Any) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
