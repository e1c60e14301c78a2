# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Compiles kernels, keeps them on disk, and runs them on torch's own threads.

A kernel is a C function of one pointer, to a record of sizes and addresses. Every
thread of torch's OpenMP pool enters it and takes work from a shared counter, so that
there is no second pool of threads, vLLM's binding of threads to cores holds, and a
slow thread takes less. numba's own threads are never started.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import llvmlite
import numba
import numpy as np
import torch
from numba.core import types
from numba.core.ccallback import CFunc

from vllm import envs
from vllm.fp8_inc.attention.kernels import rows
from vllm.fp8_inc.attention.kernels.vectors import check_cpu
from vllm.logger import init_logger

logger = init_logger(__name__)

# Each record begins with them: the work that is taken, and the threads that came.
_HEAD = [("next_item", np.int64), ("next_thread", np.int64)]


# What kernels call a dtype; uint8: codes of FP8.
KINDS = {
    torch.uint8: rows.FP8,
    torch.bfloat16: rows.BF16,
    torch.float16: rows.FP16,
    torch.float32: rows.FLOAT32,
}


def record_type(integers: str, floats: str = "") -> np.dtype:
    """The record of a kernel: fields by name, int64 and float32."""
    fields = [(name, np.int64) for name in integers.split()]
    return np.dtype(_HEAD + fields + [(name, np.float32) for name in floats.split()])


class Kernel:
    """A function that all threads run.

    Args:
        function: Takes a pointer to the record; numba compiles it.
        record: Its record, from ``record_type``.
    """

    def __init__(self, function: Callable, record: np.dtype) -> None:
        self.function = function
        self.record = record
        self.names = record.names[len(_HEAD) :]
        kinds = (record[name] for name in record.names)
        self.layout = struct.Struct("@" + "".join(kind.char for kind in kinds))
        self.memory = ctypes.c_char * self.layout.size

    def bind(self, calls: int, **fields: float) -> "Bound":
        """Packs all but the first ``calls`` fields of the record once."""
        return Bound(self, calls, [fields[name] for name in self.names[calls:]])

    @functools.cached_property
    def compiled(self) -> CFunc:
        """Compiles, or loads from disk."""
        check_cpu()
        signature = types.void(types.CPointer(numba.from_dtype(self.record)))
        folder = cache_folder()
        options = {"cache": folder is not None, "error_model": "numpy"}
        with _kept_in(folder):
            return numba.cfunc(signature, **options)(self.function)

    def compile(self) -> None:
        """Makes the first call as fast as any other."""
        _ = self.compiled

    @property
    def from_disk(self) -> bool:
        """Whether it was found on disk."""
        return bool(self.compiled.cache_hits)

    def __call__(self, threads: int, **fields: float) -> None:
        """Runs on ``threads`` threads, this one included."""
        values = map(fields.__getitem__, self.names)
        record = self.memory.from_buffer_copy(self.layout.pack(0, 0, *values))
        function = self.compiled.address
        if threads == 1:
            _serial(function)(record)
        else:
            _openmp()(function, record, threads, 0)


class Bound:
    """A kernel with most of its record packed: a call has little left to do.

    Args:
        kernel: Of which.
        calls: How many int64 fields come with each call.
        values: All other fields, in order.
    """

    def __init__(self, kernel: Kernel, calls: int, values: list[float]) -> None:
        head = len(_HEAD) + calls
        kinds = kernel.layout.format[1 + head :]
        self._head = struct.Struct(f"@{head}q").pack
        self._rest = struct.Struct("@" + kinds).pack(*values)
        self._memory = kernel.memory
        self._address = kernel.compiled.address
        self._serial = _serial(self._address)

    def __call__(self, threads: int, *values: int) -> None:
        """Runs on ``threads`` threads, this one included."""
        record = self._memory.from_buffer_copy(self._head(0, 0, *values) + self._rest)
        if threads == 1:
            self._serial(record)
        else:
            _openmp()(self._address, record, threads, 0)


@functools.cache
def _serial(address: int) -> Callable:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@functools.cache
def _openmp() -> Callable:
    """The entry of the OpenMP runtime that torch uses, GNU's or Intel's."""
    parallel = ctypes.CDLL(None).GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@contextlib.contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """Makes numba keep what is decorated inside in ``folder``."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or before)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def threads_for(operations: float) -> int:
    """How many threads are worth waking for so many multiply-adds."""
    return 1 if operations < SMALL else torch.get_num_threads()


# Multiply-adds. Below, waking threads takes longer than the work.
SMALL = 200_000


def _hash_of_sources() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


# After that long without a start, kernels of other sources are deleted.
_UNUSED_DAYS = 30
# Taken while the modules are imported: an edit that follows must not get their code.
_SOURCES = _hash_of_sources()


@functools.cache
def cache_folder() -> Path | None:
    """Where compiled kernels are kept: under VLLM_CACHE_ROOT, by their sources' hash.

    numba itself looks at one source file of the several that make a kernel. None where
    VLLM_DISABLE_COMPILE_CACHE is set or the folder is not safe to use.
    """
    if envs.VLLM_DISABLE_COMPILE_CACHE:
        return None
    root = Path(envs.VLLM_CACHE_ROOT) / "fp8_inc_kernels"
    folder = root / _SOURCES
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_owner(root)
        _check_owner(folder)
        probe = folder / f".probe{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        logger.warning(
            "fp8_inc: compiled kernels cannot be kept in %s (%s): the attention "
            "kernels are compiled at each start. Set VLLM_CACHE_ROOT to another folder",
            folder,
            error,
        )
        return None
    _delete_unused(root)
    return folder


def _delete_unused(root: Path) -> None:
    """Deletes what other sources compiled and no process took for a long time.

    Each start touches its folder. A folder of another name, or of another user, stays;
    so does one that another process deletes or uses meanwhile: the next start tries.
    """
    oldest = time.time() - _UNUSED_DAYS * 24 * 60 * 60
    for folder in root.iterdir():
        if not re.fullmatch("[0-9a-f]{16}", folder.name) or folder.is_symlink():
            continue
        with contextlib.suppress(OSError):
            status = folder.stat()
            if status.st_uid == os.getuid() and status.st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)


def _check_owner(folder: Path) -> None:
    """Machine code is loaded from there: nobody else may write it.

    Raises:
        PermissionError: If the folder is another user's, or others may write to it.
    """
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to user {status.st_uid}")
    if status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others; chmod 700 it")
