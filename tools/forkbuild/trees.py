# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""An upstream source tree, whether it lies in a wheel or in a folder."""

import csv
import zipfile
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Protocol

from forkbuild.fork import ForkError


class Tree(Protocol):
    """Read access to an upstream release; paths are relative, with forward slashes."""

    @property
    def label(self) -> str:
        """What errors call it."""

    @property
    def names(self) -> Collection[str]:
        """The paths of all files."""

    def read(self, name: str) -> bytes:
        """The content of one file."""


class WheelTree:
    """The files of a wheel, its dist-info included."""

    def __init__(self, path: Path):
        """Opens a wheel; the file is kept open."""
        self.path = path
        self.label = path.name
        self.zip = zipfile.ZipFile(path)
        self.names = frozenset(self.zip.namelist())

    def read(self, name: str) -> bytes:
        """The content of one file."""
        return self.zip.read(name)

    @cached_property
    def dist_info(self) -> str:
        """The name of the .dist-info folder."""
        found = {name.split("/")[0] for name in self.names if ".dist-info/" in name}
        if len(found) != 1:
            raise ForkError(f"{self.label}: expected one .dist-info, found {found}")
        return found.pop()

    @cached_property
    def record(self) -> dict[str, tuple[str, int]]:
        """RECORD: path -> (hash as RECORD writes it, size); RECORD itself left out."""
        rows = self.read(f"{self.dist_info}/RECORD").decode("utf-8").splitlines()
        parts = csv.reader(rows)  # some names hold commas
        return {name: (sha, int(size)) for name, sha, size in parts if sha}


class FolderTree:
    """The files of a folder, such as a checkout of vllm-gaudi."""

    def __init__(self, path: Path):
        """Lists a folder's files, without those in .git."""
        self.path = path
        self.label = str(path)

    @cached_property
    def names(self) -> frozenset[str]:
        """The paths of all files."""
        files = (path for path in self.path.rglob("*") if path.is_file())
        relative = (path.relative_to(self.path) for path in files)
        return frozenset(p.as_posix() for p in relative if p.parts[0] != ".git")

    def read(self, name: str) -> bytes:
        """The content of one file."""
        return (self.path / name).read_bytes()


def open_tree(path: Path) -> Tree:
    """Opens a wheel or a folder."""
    if path.is_dir():
        return FolderTree(path)
    if not zipfile.is_zipfile(path):
        raise ForkError(f"{path}: neither a wheel nor a folder")
    return WheelTree(path)
