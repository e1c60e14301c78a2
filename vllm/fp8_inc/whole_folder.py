# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes a file or a folder whole or not at all."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a folder beside ``path`` that takes its name once all is written.

    Raises:
        ValueError: If ``path`` is there already, or cannot be written.
    """
    if path.exists():
        raise ValueError(f"{path} is there already; name another folder")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        part.mkdir()
        try:
            yield part
            os.rename(part, path)
        except BaseException:  # an interrupt too
            shutil.rmtree(part, ignore_errors=True)
            raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a file beside ``path`` that takes its place once all is written.

    Raises:
        ValueError: If it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def check_writable(path: Path) -> None:
    """Checks that a file or folder ``path`` can be made, before hours of work.

    Raises:
        ValueError: If it cannot.
    """
    with new_file(path.with_name(f"{path.name}.probe")) as part:
        part.write_bytes(b" " * 4096)
    path.with_name(f"{path.name}.probe").unlink()


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Says of a full disk or a read-only folder what could not be written."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"{path} cannot be written: {reason}. Nothing is left there; make room, "
            "or name another place"
        ) from error


def _remove_abandoned(path: Path) -> None:
    """Removes what processes that were killed left beside ``path``."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([0-9]+)\.part")
    for part in path.parent.iterdir():
        found = pattern.fullmatch(part.name)
        if found and not _is_alive(int(found[1])):
            shutil.rmtree(part, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    except OverflowError:
        return False
    return True


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
