# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A copy of the HPU worker, patched, that Python imports from a folder.

vLLM finds plugins by the entry points of installed distributions. A folder on
PYTHONPATH counts as one where it has a dist-info, so that nothing is installed.
"""

import ast
import os
import shutil
from pathlib import Path

from forkbuild.fork import ForkError
from forkbuild.hunks import make_hunks
from forkbuild.patchset import Patch, patched_files
from forkbuild.trees import FolderTree

PACKAGE = "vllm_gaudi"
_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


def write_worker(checkout: Path, out: Path, patches: list[Patch]) -> None:
    """Writes ``out``: the package vllm_gaudi with ``patches``, and a dist-info.

    Raises:
        ForkError: ``checkout`` holds no vllm-gaudi, or a patch does not apply.
    """
    if not (checkout / PACKAGE / "__init__.py").is_file():
        raise ForkError(f"{checkout}: no checkout of vllm-gaudi (no {PACKAGE}/)")
    changed = patched_files(patches, FolderTree(checkout))
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    shutil.copytree(
        checkout / PACKAGE,
        part / PACKAGE,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name, data in changed.items():
        (part / name).write_bytes(data)
    info = part / f"{PACKAGE}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0\n", "utf-8"
    )
    text = _entry_points_text(checkout / "setup.py")
    (info / "entry_points.txt").write_text(text, "utf-8")
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def exported_worker(
    checkout: Path, edited: Path, patches: list[Patch]
) -> dict[Patch, str]:
    """The text of each patch as an edited copy has it, for those that differ.

    Raises:
        ForkError: A file was changed that no patch owns.
    """
    upstream, copy = FolderTree(checkout), FolderTree(edited)
    owned = {patch.target: patch for patch in patches}
    result = {}
    for name in sorted(copy.names & upstream.names):
        old, new = upstream.read(name), copy.read(name)
        if name in owned:
            hunks = make_hunks(old.decode("utf-8"), new.decode("utf-8"))
            text = owned[name].with_hunks(hunks)
            if text != owned[name].path.read_text("utf-8"):
                result[owned[name]] = text
        elif old != new:
            raise ForkError(
                f"{edited}/{name}: changed, but no patch changes this file; start one "
                "in patches/vllm_gaudi: its header and its ---/+++ lines"
            )
    return result


def _entry_points_text(setup: Path) -> str:
    """The entry points that vLLM loads, read from setup.py without running it."""
    for node in ast.walk(ast.parse(setup.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "entry_points":
            groups = ast.literal_eval(node.value)
            return "\n".join(
                "\n".join([f"[{group}]", *groups[group], ""]) for group in _GROUPS
            )
    raise ForkError(f"{setup}: no keyword entry_points")
