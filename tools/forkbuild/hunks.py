# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Unified diffs of one file: read, apply exactly, make, write.

`patch` and `git apply` may be absent where the wheel is built, and Python's patch
libraries either tolerate what does not match or cannot say where it would match.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from forkbuild.fork import ForkError

_RANGE = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True)
class Hunk:
    """One change.

    Attributes:
        start: Line of the old file, from 0, at which the hunk was recorded.
        lines: (mark, text) pairs; mark is one of " -+", text has its line end.
        section: The class or function that it is in, for readers only.
    """

    start: int
    lines: tuple[tuple[str, str], ...]
    section: str = ""

    @property
    def old(self) -> list[str]:
        """Context and removed lines: what the file must hold, exactly."""
        return [text for mark, text in self.lines if mark != "+"]

    @property
    def new(self) -> list[str]:
        """Context and added lines: what stands there afterwards."""
        return [text for mark, text in self.lines if mark != "-"]

    @property
    def changed(self) -> int:
        """The number of added and removed lines."""
        return sum(mark != " " for mark, _ in self.lines)


@dataclass(frozen=True)
class Place:
    """Where a hunk matches an old file.

    Attributes:
        line: From 0; None where it does not match, or matches several times but not
            at the recorded line.
        matches: At how many lines of the file the old lines occur.
    """

    line: int | None
    matches: int


def split_lines(text: str) -> list[str]:
    """Splits at line feeds only and keeps them (str.splitlines splits at more)."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def parse_hunks(text: str, where: str) -> list[Hunk]:
    """Reads the hunks that follow the ---/+++ lines of a diff of one file.

    Args:
        text: From the first `@@` line on.
        where: The patch's name, for errors.

    Raises:
        ForkError: Not a unified diff, or a hunk that could go anywhere.
    """
    rows = text.removesuffix("\n").split("\n") if text else []
    hunks: list[Hunk] = []
    at = 0
    while at < len(rows):
        name = f"{where}: hunk {len(hunks) + 1}"
        header = _RANGE.match(rows[at])
        if not header:
            raise ForkError(f"{name}: expected an @@ line, found {rows[at]!r}")
        start, old, _, new = (int(n) if n else 1 for n in header.groups()[:4])
        lines, at = _parse_body(rows, at + 1, old, new, name)
        if old == 0:
            raise ForkError(
                f"{name}: neither a context line nor a removed one, so its place "
                "cannot be verified; give it one line of context"
            )
        hunks.append(Hunk(start - 1, tuple(lines), header[5].strip()))
    return hunks


def _parse_body(rows: Sequence[str], at: int, old: int, new: int, name: str):
    """Reads as many lines as the @@ line counts; returns them and the next row."""
    lines: list[tuple[str, str]] = []
    while (old > 0 or new > 0) and at < len(rows):
        mark, text = rows[at][:1], rows[at][1:] + "\n"
        if mark not in (" ", "-", "+"):
            break
        old -= mark != "+"
        new -= mark != "-"
        lines.append((mark, text))
        at += 1
        if at < len(rows) and rows[at].startswith("\\"):
            lines[-1] = (mark, text[:-1])
            at += 1
    if old or new:
        raise ForkError(
            f"{name}: the @@ line counts {old:+d} old and {new:+d} new lines more "
            f"than the hunk has (before row {at + 1} of the diff)"
        )
    return lines, at


def locate(lines: Sequence[str], hunk: Hunk, after: int = 0) -> Place:
    """Finds a hunk: at its recorded line, else at the only line where it matches.

    Args:
        lines: The old file.
        hunk: What to find.
        after: The line from which the hunk may start: the end of the one before.
    """
    old = hunk.old
    first = old[0]
    found = [
        line
        for line in range(len(lines) - len(old) + 1)
        if lines[line] == first and lines[line : line + len(old)] == old
    ]
    usable = [line for line in found if line >= after]
    if hunk.start in usable:
        return Place(hunk.start, len(found))
    return Place(usable[0] if len(usable) == 1 else None, len(found))


def apply_hunks(text: str, hunks: Sequence[Hunk], where: str) -> str:
    """Applies hunks with zero fuzz: every context and removed line matches exactly.

    Raises:
        ForkError: A hunk that matches nowhere, or at several lines but not at its own.
    """
    lines = split_lines(text)
    result: list[str] = []
    done = 0
    for number, hunk in enumerate(hunks, 1):
        place = locate(lines, hunk, done)
        if place.line is None:
            reason = "matches nowhere"
            if place.matches:
                reason = f"matches {place.matches} times, but not at its own line"
            raise ForkError(
                f"{where}: hunk {number} (line {hunk.start + 1}) {reason}; upstream "
                "changed here: adapt the patch's context and removed lines by hand"
            )
        result += lines[done : place.line] + hunk.new
        done = place.line + len(hunk.old)
    return "".join(result + lines[done:])


def make_hunks(old_text: str, new_text: str) -> list[Hunk]:
    """The changes between two texts, each with as little context as places it.

    Context is the same number of lines before and after (GNU patch and git take less
    on one side for an end of the file), and grows until the old lines occur once.
    """
    old, new = split_lines(old_text), split_lines(new_text)
    spans: list[list[int]] = []  # [old start, old end] with context
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    changes = [op for op in matcher.get_opcodes() if op[0] != "equal"]
    for _, start, end, _, _ in changes:
        low, high = _grow(old, start, end)
        if spans and low <= spans[-1][1]:
            spans[-1][1] = max(high, spans[-1][1])
        else:
            spans.append([low, high])
    return [_hunk(old, new, changes, low, high) for low, high in spans]


def _grow(old: list[str], start: int, end: int) -> tuple[int, int]:
    for context in range(0 if end > start else 1, len(old) + 2):
        low, high = max(0, start - context), min(len(old), end + context)
        if high == low:  # an empty file: nothing to hold on to
            raise ForkError("a patch cannot fill an empty file; add a new file instead")
        if locate(old, Hunk(0, tuple((" ", x) for x in old[low:high]))).matches == 1:
            break
    return low, high


def _hunk(old, new, changes, low: int, high: int) -> Hunk:
    lines: list[tuple[str, str]] = []
    at = low
    for _, i1, i2, j1, j2 in changes:
        if i1 < low or i2 > high:
            continue
        lines += [(" ", text) for text in old[at:i1]]
        lines += [("-", text) for text in old[i1:i2]]
        lines += [("+", text) for text in new[j1:j2]]
        at = i2
    lines += [(" ", text) for text in old[at:high]]
    return Hunk(low, tuple(lines), _section(old[:low]))


def _section(before: list[str]) -> str:
    """The last line that starts with a letter, as git shows it after the @@."""
    heads = (x for x in reversed(before) if x[0].isalpha() or x[0] in "_$")
    return next(heads, "")[:80].strip()


def format_hunks(hunks: Sequence[Hunk]) -> str:
    """Writes hunks as parse_hunks reads them."""
    rows: list[str] = []
    shift = 0
    for hunk in hunks:
        old, new = len(hunk.old), len(hunk.new)
        # A count of zero refers to the line before, by the format's definition.
        to = hunk.start + shift + (1 if new else 0)
        section = f" {hunk.section}" if hunk.section else ""
        ranges = f"-{_range(hunk.start + 1, old)} +{_range(to, new)}"
        rows.append(f"@@ {ranges} @@{section}\n")
        for mark, text in hunk.lines:
            end = "" if text.endswith("\n") else f"\n{_NO_NEWLINE}\n"
            rows.append(mark + text + end)
        shift += new - old
    return "".join(rows)


def _range(line: int, count: int) -> str:
    return str(line) if count == 1 else f"{line},{count}"
