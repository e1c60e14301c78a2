#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes a requirements file with the hash of every package that pip would install.

    python tools/lock.py requirements.lock [pip's options, e.g. --extra-index-url URL]

pip itself resolves and reports (`pip install --dry-run --report`); it installs nothing.
The lock is for this platform, this Python and the indices that pip is configured for.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXTRAS = ".[test,lint,kv-scales]"


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


def main(path: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
        command += ["--ignore-installed", "--report", str(report), *options, EXTRAS]
        subprocess.run(command, check=True)
        lines = lock_lines(json.loads(report.read_text()))
    part = Path(f"{path}.part")
    part.write_text("\n".join(lines) + "\n")
    os.replace(part, path)
    print(f"{path}: {len(lines)} packages")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
