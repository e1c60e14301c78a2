# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""How the patches fare on another upstream release."""

from forkbuild.fork import ForkError
from forkbuild.hunks import locate, split_lines
from forkbuild.patchset import Patch
from forkbuild.trees import Tree


def rebase_report(patch: Patch, tree: Tree) -> tuple[bool, str]:
    """Tries one patch.

    Returns:
        Whether it applies, and one line that says how.
    """
    if patch.target not in tree.names:
        return False, f"FAILS: there is no {patch.target}"
    text = tree.read(patch.target).decode("utf-8")
    try:
        patch.apply(text)
    except ForkError as error:
        return False, f"FAILS: {error}"
    lines = split_lines(text)
    moved, doubtful, done = [], [], 0
    for number, hunk in enumerate(patch.hunks, 1):
        place = locate(lines, hunk, done)
        done = place.line + len(hunk.old)
        if place.line != hunk.start:
            moved.append(f"hunk {number}: {hunk.start + 1} -> {place.line + 1}")
        if place.matches > 1:
            doubtful.append(f"hunk {number} matches {place.matches} times")
    report = f"applies at another line ({', '.join(moved)})" if moved else "applies"
    if doubtful:
        report += f"; LOOK: {', '.join(doubtful)}"
    return True, report
