# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the edits made in build/dev into the patches."""

from forkbuild.devtree import DevTree
from forkbuild.fork import ForkError
from forkbuild.hunks import make_hunks
from forkbuild.patchset import Patch
from forkbuild.wheelfile import record_hash


def exported(tree: DevTree) -> dict[Patch, str]:
    """The text of each patch as build/dev has it, for the patches that differ.

    Raises:
        ForkError: A changed file that no patch owns, a patch with nothing left to
            change, or a patch file that was edited after the tree was built.
    """
    upstream = tree.build.upstream
    patches = {patch.target: patch for patch in tree.build.patches}
    for name in tree.edits():
        if name not in patches or not (tree.path / name).is_file():
            raise ForkError(_unowned(name, name in upstream.names, tree))
    result = {}
    for name, patch in patches.items():
        pristine = upstream.read(name).decode("utf-8")
        current = (tree.path / name).read_bytes()
        text = _export(patch, pristine, current, tree.written[name])
        if text != patch.path.read_bytes().decode("utf-8"):
            result[patch] = text
    return result


def _export(patch: Patch, pristine: str, current: bytes, written: str) -> str:
    target = patch.apply(pristine).encode("utf-8")
    if current != target and record_hash(target) != written:
        raise ForkError(
            f"{patch.name}: newer than build/dev, which export would write over it; "
            "run `pip install -e .` first"
        )
    hunks = make_hunks(pristine, current.decode("utf-8"))
    if not hunks:
        raise ForkError(
            f"{patch.name}: build/dev/{patch.target} is as upstream has it; delete "
            "the patch and its line in series, or edit the file"
        )
    return patch.with_hunks(hunks)


def _unowned(name: str, is_upstream: bool, tree: DevTree) -> str:
    if not (tree.path / name).is_file():
        return f"build/dev/{name}: deleted; a patch cannot do that, put it back"
    if is_upstream:
        return (
            f"build/dev/{name}: changed, but no patch changes this file; start one in "
            "patches/vllm: its header and its ---/+++ lines (see patches/README.md)"
        )
    return f"build/dev/{name}: upstream has no such file; move it to {name}"
