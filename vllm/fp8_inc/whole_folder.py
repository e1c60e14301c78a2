# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes a folder whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a folder beside ``path`` that takes its name once all is written.

    Raises:
        ValueError: If ``path`` is there already.
    """
    if path.exists():
        raise ValueError(f"{path} is there already; name another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        yield part
        os.rename(part, path)
    except BaseException:  # an interrupt too
        shutil.rmtree(part, ignore_errors=True)
        raise


def link_or_copy(source: Path, target: Path, copy: bool) -> None:
    """Gives ``target`` the content of ``source``; a link takes no room."""
    source = source.resolve()
    if not copy:
        with contextlib.suppress(OSError):  # another file system
            os.link(source, target)
            return
        target.symlink_to(source)
        return
    shutil.copyfile(source, target)


def copy_small_files(source: Path, target: Path) -> None:
    """Copies what lies beside the weights: configurations, tokenizer, code."""
    for path in sorted(source.iterdir()):
        if path.is_dir() or path.suffix in WEIGHTS or ".index." in path.name:
            continue
        shutil.copyfile(path, target / path.name)
