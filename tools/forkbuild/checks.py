# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What `tools/patches.py check` requires of a set of patches."""

from collections.abc import Iterator

from forkbuild.fork import ForkError
from forkbuild.hunks import make_hunks
from forkbuild.patchset import MAX_CHANGED, Patch
from forkbuild.trees import Tree


def problems(patches: list[Patch], tree: Tree) -> list[str]:
    """Checks each patch against the pinned upstream; returns one line a problem."""
    return [problem for patch in patches for problem in _problems(patch, tree)]


def _problems(patch: Patch, tree: Tree) -> Iterator[str]:
    try:
        fields = patch.fields
    except ForkError as error:
        yield str(error)
        fields = {}
    if patch.changed > MAX_CHANGED and not fields.get("Size"):
        yield (
            f"{patch.name}: {patch.changed} changed lines; call a new file instead "
            f"(at most {MAX_CHANGED}), or say why not in a header field `Size:`"
        )
    if patch.target not in tree.names:
        yield f"{patch.name}: {tree.label} has no file {patch.target}"
        return
    old = tree.read(patch.target).decode("utf-8")
    try:
        new = patch.apply(old)
    except ForkError as error:
        yield str(error)
        return
    if old == new:
        yield f"{patch.name}: changes nothing"
    if patch.with_hunks(make_hunks(old, new)) != patch.path.read_text("utf-8"):
        yield (
            f"{patch.name}: applies, but not as export would write it (other line "
            "numbers, context or section); run `tools/patches.py export`"
        )
    if patch.target.endswith(".py"):
        try:
            compile(new, patch.target, "exec", dont_inherit=True)
        except SyntaxError as error:
            yield f"{patch.name}: {patch.target} does not compile: {error}"
