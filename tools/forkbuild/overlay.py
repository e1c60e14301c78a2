# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""vllm/: the files that the fork adds, at their paths inside vLLM."""

import os
from collections.abc import Collection
from pathlib import Path

from forkbuild.fork import ForkError

OVERLAY = "vllm"


def overlay_files(root: Path) -> dict[str, Path]:
    """The files under vllm/, by their path relative to the repository, sorted.

    Bytecode and hidden files are left out.

    Raises:
        ForkError: vllm/__init__.py exists.
    """
    result = {}
    for folder, folders, files in os.walk(root / OVERLAY):
        folders[:] = sorted(
            name for name in folders if name != "__pycache__" and name[0] != "."
        )
        for name in files:
            path = Path(folder, name)
            if name[0] != "." and path.suffix not in (".pyc", ".pyo"):
                result[path.relative_to(root).as_posix()] = path
    if f"{OVERLAY}/__init__.py" in result:
        raise ForkError(
            "vllm/__init__.py must not exist: upstream has that file, and with it "
            "Python in the repository's root would import this folder as vLLM"
        )
    return dict(sorted(result.items()))


def check_overlay(overlay: Collection[str], upstream: Collection[str]) -> None:
    """Raises ForkError if an overlay file is also an upstream file."""
    for path in overlay:
        if path in upstream:
            raise ForkError(
                f"{path}: upstream has this file too; a change to it is a patch in "
                "patches/vllm, a file of our own needs another name"
            )


def overlay_links(overlay: Collection[str], upstream: Collection[str]) -> list[str]:
    """The fewest paths to link so that a tree shows the overlay.

    A folder that upstream does not have is linked whole, so that files created in it
    later are seen; in a folder that it has, each file is linked.
    """
    folders = {parent.as_posix() for name in upstream for parent in Path(name).parents}
    links = set()
    for path in overlay:
        lineage = [parent.as_posix() for parent in reversed(Path(path).parents)]
        new = [parent for parent in lineage if parent not in folders]
        links.add(new[0] if new else path)
    return sorted(links)
