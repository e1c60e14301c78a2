#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes a requirements file with the hash of every package that pip would install.

    python tools/lock.py requirements.lock [pip's options, e.g. --extra-index-url URL]
    python tools/lock.py --check requirements.lock

pip itself resolves and reports (`pip install --dry-run --report`); it installs nothing.
The lock is for this platform, this Python and the indices that pip is configured for.
`--check` fails for a lock that pyproject.toml has left behind.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXTRAS = ("test", "lint", "kv-scales")


def lock_lines(report: dict[str, Any]) -> list[str]:
    """A line for each package of a report of pip, but for the fork itself.

    Raises:
        ValueError: For a package without a sha256.
    """
    lines = []
    for item in report["install"]:
        info, name = item["download_info"], item["metadata"]["name"]
        if "dir_info" in info:
            continue
        digest = info.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise ValueError(f"{name} comes from {info['url']} and has no sha256")
        version = item["metadata"]["version"]
        lines.append(f"{name.lower()}=={version} --hash=sha256:{digest}")
    return sorted(lines)


def stale_pins(lock: str, pins: list[str]) -> list[str]:
    """One line for each requirement that the text of a lock does not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = re.findall(r"^([^\s=]+)==(\S+)", lock, re.MULTILINE)
    locked = {canonicalize_name(name): version for name, version in found}
    stale = []
    for pin in map(Requirement, pins):
        version = locked.get(canonicalize_name(pin.name))
        applies = pin.marker is None or pin.marker.evaluate()
        if applies and not (version and pin.specifier.contains(version)):
            has = version or "nothing"
            stale.append(f"{pin.name}: pyproject.toml has {pin}, the lock {has}")
    return stale


def pins_of(fork: dict[str, Any]) -> list[str]:
    """What [tool.fork] itself requires of `make install`."""
    groups = [*fork["replace"].values(), *(fork["extras"][name] for name in EXTRAS)]
    return [pin for group in groups for pin in group]


def check(path: str) -> None:
    """Ends with 1 and a line for each stale pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    stale = stale_pins(Path(path).read_text("utf-8"), pins_of(project["tool"]["fork"]))
    if stale:
        sys.exit("\n".join([*stale, f"{path} is stale: make lock"]))


def write(path: str, *options: str) -> None:
    """Asks pip, and writes the lock whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
        command += ["--ignore-installed", "--report", str(report), *options]
        subprocess.run([*command, f"{ROOT}[{','.join(EXTRAS)}]"], check=True)
        lines = lock_lines(json.loads(report.read_text()))
    python = ".".join(platform.python_version_tuple()[:2])
    place = f"# For Python {python} on {platform.system()} {platform.machine()}"
    part = Path(f"{path}.part")
    part.write_text("\n".join([place, *lines]) + "\n")
    os.replace(part, path)
    print(f"{path}: {len(lines)} packages")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--check":
        check(*sys.argv[2:])
    else:
        write(*sys.argv[1:])
