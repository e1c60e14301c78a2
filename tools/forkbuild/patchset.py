# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The patches of one upstream package: patches/<package>/series and *.patch."""

import re
from dataclasses import dataclass
from pathlib import Path

from forkbuild.fork import ForkError
from forkbuild.hunks import Hunk, apply_hunks, format_hunks, parse_hunks
from forkbuild.trees import Tree

KINDS = ("temporary", "build", "by-design")
REQUIRED = ("Subject", "Kind", "Forwarded", "Justification", "Drop-When")
OPTIONAL = ("Size",)
MAX_CHANGED = 10

_TARGET = re.compile(
    r"^(?:diff --git .*\n(?:index .*\n)?)?--- a/(.+)\n\+\+\+ b/(.+)\n", re.MULTILINE
)


@dataclass(frozen=True)
class Patch:
    """One patch file: a header that says why, and the change to one upstream file.

    Attributes:
        path: The patch file.
        header: Its text before the diff, as written.
        target: The upstream file, relative to the tree's root.
        hunks: The changes.
    """

    path: Path
    header: str
    target: str
    hunks: tuple[Hunk, ...]

    @property
    def name(self) -> str:
        """The file's name, with .patch."""
        return self.path.name

    @property
    def fields(self) -> dict[str, str]:
        """The header's fields; lines that start with a space continue a field."""
        return parse_header(self.header, self.name)

    @property
    def changed(self) -> int:
        """Added plus removed lines."""
        return sum(hunk.changed for hunk in self.hunks)

    def apply(self, text: str) -> str:
        """Applies the patch to its upstream file's text; see apply_hunks."""
        return apply_hunks(text, self.hunks, f"{self.name}: {self.target}")

    def with_hunks(self, hunks: list[Hunk]) -> str:
        """The patch file's text with the same header and other hunks."""
        names = f"--- a/{self.target}\n+++ b/{self.target}\n"
        return self.header + names + format_hunks(hunks)


def parse_patch(path: Path) -> Patch:
    """Reads a patch file.

    Raises:
        ForkError: Not a diff of exactly one existing file with a/ and b/ prefixes.
    """
    text = path.read_bytes().decode("utf-8")
    match = _TARGET.search(text)
    if not match or match[1] != match[2]:
        raise ForkError(
            f"{path.name}: no `--- a/FILE` and `+++ b/FILE` lines that name one file "
            "(files that upstream does not have belong in vllm/, not in a patch)"
        )
    where = f"{path.name}: {match[1]}"
    hunks = parse_hunks(text[match.end() :], where)
    return Patch(path, text[: match.start()], match[1], tuple(hunks))


def parse_header(header: str, name: str) -> dict[str, str]:
    """Reads DEP-3 style fields.

    Raises:
        ForkError: A field is unknown, missing, empty, given twice, or not allowed.
    """
    fields: dict[str, str] = {}
    key = ""
    for line in header.splitlines():
        if line.startswith(" ") and key:
            fields[key] += " " + line.strip()
        elif line.strip():
            key, colon, value = line.partition(":")
            if not colon or key not in REQUIRED + OPTIONAL or key in fields:
                raise ForkError(
                    f"{name}: header line {line!r} is not one of these fields, each "
                    f"once: {', '.join(REQUIRED + OPTIONAL)} "
                    "(a continued line starts with a space)"
                )
            fields[key] = value.strip()
    for key in REQUIRED:
        if not fields.get(key):
            raise ForkError(f"{name}: header field {key} is missing or empty")
    if fields["Kind"] not in KINDS:
        raise ForkError(f"{name}: Kind must be one of {', '.join(KINDS)}")
    if not re.fullmatch(r"no|not-needed|https?://\S+", fields["Forwarded"]):
        raise ForkError(f"{name}: Forwarded must be `no`, `not-needed` or a URL")
    return fields


def load_series(folder: Path) -> list[Patch]:
    """Reads the patches of a folder in the order of its series file.

    Raises:
        ForkError: A patch is missing, listed twice or not listed; two patches change
            the same file; a patch cannot be read.
    """
    series = folder / "series"
    if not series.is_file():
        raise ForkError(f"{series}: missing; it lists the folder's patches, one a line")
    lines = (line.strip() for line in series.read_text("utf-8").splitlines())
    names = [line for line in lines if line and not line.startswith("#")]
    for name in names:
        if names.count(name) > 1:
            raise ForkError(f"{series}: {name} is listed more than once")
        if not (folder / name).is_file():
            raise ForkError(f"{series}: {name} is listed, but there is no such file")
    for path in sorted(folder.glob("*.patch")):
        if path.name not in names:
            raise ForkError(f"{path}: not listed in {series}; add it, or delete it")
    patches = [parse_patch(folder / name) for name in names]
    owners: dict[str, str] = {}
    for patch in patches:
        other = owners.setdefault(patch.target, patch.name)
        if other != patch.name:
            raise ForkError(
                f"{patch.name} and {other} both change {patch.target}; "
                "join them: one patch an upstream file, so that order never matters"
            )
    return patches


def patched_files(patches: list[Patch], tree: Tree) -> dict[str, bytes]:
    """Applies each patch to the upstream tree; returns the changed files by path."""
    result = {}
    for patch in patches:
        if patch.target not in tree.names:
            raise ForkError(
                f"{patch.name}: {tree.label} has no file {patch.target}; "
                "find where upstream moved it, and adapt the patch"
            )
        if not patch.hunks:
            raise ForkError(
                f"{patch.name}: no hunk yet; edit build/dev/{patch.target} and run "
                "`tools/patches.py export`"
            )
        text = tree.read(patch.target).decode("utf-8")
        result[patch.target] = patch.apply(text).encode("utf-8")
    return result
