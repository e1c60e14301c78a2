# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Tensors "on hpu" say so, and lie in host memory: hpu_device.cpp, built on demand.

It needs a C++ compiler; PyTorch's wheel brings its own headers. The library is kept in
build/hpu, under the hash of all that it depends on.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from soft_gaudi.device import Memory

_SOURCE = Path(__file__).with_name("hpu_device.cpp")
_KEPT = Path(__file__).resolve().parents[2] / "build" / "hpu"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")
_LIBRARIES = ("-ltorch_cpu", "-lc10")


class DeviceMemory(Memory):
    """What the library has allocated."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.allocated = library.soft_gaudi_allocated
        self.peak = library.soft_gaudi_peak
        self.reset_peak = library.soft_gaudi_reset_peak
        self.allocated.restype = self.peak.restype = ctypes.c_int64


def load() -> DeviceMemory:
    """Gives PyTorch the device, once a process.

    Raises:
        RuntimeError: Without a compiler, or if it fails.
    """
    path = library()
    torch.ops.load_library(path)
    return DeviceMemory(ctypes.CDLL(str(path)))


def library() -> Path:
    """The shared library, built if it is not there yet.

    Raises:
        RuntimeError: See ``load``.
    """
    known = hashlib.sha256(_SOURCE.read_bytes())
    known.update(f"{torch.__version__} {torch.__file__} {_FLAGS}".encode())
    path = _KEPT / f"hpu_device-{known.hexdigest()[:16]}.so"
    if not path.exists():
        _build(path)
    return path


def _build(path: Path) -> None:
    """Writes beside ``path`` and renames, since ranks may build at once."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next(filter(None, map(shutil.which, filter(None, names))), None)
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (CXX, c++, g++ or clang++)")
    root = Path(torch.__file__).parent
    headers = (root / "include", root / "include/torch/csrc/api/include")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    command = [
        *[compiler, *_FLAGS, *(f"-I{folder}" for folder in headers), str(_SOURCE)],
        *["-o", str(beside), f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", *_LIBRARIES],
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        first = errors[0] if errors else result.stderr[-500:]
        raise RuntimeError(f"{compiler} cannot build {_SOURCE.name}: {first}")
    beside.replace(path)
