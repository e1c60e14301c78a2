# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A row of a fault table, and what must hold for every row.

A fault is built into a good thing; a command must then end with exit code 1 or 2 and
one line that names the thing, and leave every file as it was.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tests.kv_scales.command import Outcome, call

# name -> how to build it, what the message must say
Faults = dict[str, tuple[Callable[[Path], object], tuple[str, ...]]]


def files_in(folder: Path) -> dict[str, str]:
    """Each path under ``folder``, with a digest of what is there."""
    return {str(path.relative_to(folder)): _digest(path) for path in folder.rglob("*")}


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if not path.is_file():
        return "folder or device"
    info = path.stat()
    if info.st_size > 1 << 26:
        return f"{info.st_size} bytes of {info.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fails(
    capfd, folder: Path, *words: object, parts: tuple[str, ...] = (), code: int = 1
) -> Outcome:
    """Runs a command that must fail, name ``parts``, and change nothing."""
    before = files_in(folder)
    done = call(capfd, *words)
    assert done.code == code, done
    assert "Traceback" not in done.err
    (line,) = [text for text in done.err.splitlines() if text.startswith("error: ")]
    for part in parts:
        assert part in line, f"{part!r} not in {line!r}"
    assert files_in(folder) == before
    return done


def server_refuses(capfd, folder: Path, *words: object, parts: tuple[str, ...]) -> str:
    """`inspect` must say that a server does not start, and why, or fail itself."""
    before = files_in(folder)
    done = call(capfd, "inspect", *words, "--device", "gaudi3", "--format", "json")
    assert done.code == 1, done
    assert "Traceback" not in done.err
    if done.out:
        text = json.loads(done.out)["devices"]["gaudi3"]["error"]
    else:
        (text,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert text is not None and "\n" not in text and len(text) < 2000
    for part in parts:
        assert part in text, f"{part!r} not in {text!r}"
    assert files_in(folder) == before
    return text
