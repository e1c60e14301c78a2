# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""build/dev: the patched upstream release as a folder, the overlay linked into it.

`pip install -e .` puts this folder on Python's path. Overlay files are edited in the
repository's vllm/; a file that a patch changes is edited here, and `tools/patches.py
export` writes the edit into the patch.
"""

import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forkbuild.build import Build
from forkbuild.fork import Fork, ForkError
from forkbuild.overlay import overlay_links
from forkbuild.wheelfile import record_hash


@dataclass(frozen=True)
class DevTree:
    """The development tree of a repository.

    dev.json beside it remembers which upstream wheel it came from, and the hash of
    each patched file as written, so that edits are told from what a build wrote.
    """

    build: Build

    @property
    def fork(self) -> Fork:
        """The repository."""
        return self.build.fork

    @property
    def path(self) -> Path:
        """The folder that goes on Python's path."""
        return self.fork.build_dir / "dev"

    @property
    def exists(self) -> bool:
        """Whether a build has finished one."""
        return self.path.is_dir() and self._state_path.is_file()

    @property
    def _state_path(self) -> Path:
        return self.fork.build_dir / "dev.json"

    @cached_property
    def written(self) -> dict[str, str]:
        """Hash by path of every upstream file as the last build wrote it."""
        state = json.loads(self._state_path.read_text("utf-8"))
        return state["files"]

    def edits(self) -> list[str]:
        """Files that differ from what the last build wrote: changed, added, removed."""
        written = dict(self.written)
        found = []
        for folder, folders, files in os.walk(self.path):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for path in (Path(folder, name) for name in files):
                name = path.relative_to(self.path).as_posix()
                if path.is_symlink() or path.suffix == ".pyc":
                    continue
                known = written.pop(name, None)
                # Nobody edits compiled files, and hashing 400 MB takes its time.
                if known is None or (
                    path.suffix != ".so" and record_hash(path.read_bytes()) != known
                ):
                    found.append(name)
        return sorted(found + list(written))

    def refresh(self) -> Path:
        """Makes the tree, or brings it up to date; returns its folder.

        Raises:
            ForkError: It holds an edit that no patch has.
        """
        targets = self._targets()
        overlay = self.build.overlay
        if not self.exists:
            if self.path.exists():
                raise ForkError(
                    f"{self.path}: left over from an interrupted build; delete it"
                )
            self._extract(targets)
        self._refuse_to_lose_edits(targets)
        for name, digest in targets.items():
            if self.written.get(name) != digest:
                self._write(name)
        for name in self.written.keys() - targets.keys():
            (self.path / name).unlink()
        self._link(overlay_links(overlay, self.build.upstream_files))
        self._save(targets)
        return self.path

    def _targets(self) -> dict[str, str]:
        """Hash by path of every upstream file as this build writes it."""
        record = self.build.upstream.record
        targets = {name: record[name][0] for name in self.build.upstream_files}
        patched = self.build.patched
        return targets | {name: record_hash(data) for name, data in patched.items()}

    def _refuse_to_lose_edits(self, targets: dict[str, str]) -> None:
        for name in self.edits():
            path = self.path / name
            if path.is_file() and record_hash(path.read_bytes()) == targets.get(name):
                continue  # the edit was exported
            raise ForkError(
                f"{path}: edited, and no patch has the edit, which a build would lose; "
                "run `tools/patches.py export`, or delete build/dev to drop all edits"
            )

    def _extract(self, targets: dict[str, str]) -> None:
        part = self.path.with_name("dev.part")
        shutil.rmtree(part, ignore_errors=True)
        archive = self.build.upstream.zip
        for name in self.build.upstream_files:
            archive.extract(name, part)
            mode = archive.getinfo(name).external_attr >> 16
            (part / name).chmod((mode & 0o777) or 0o644)
        for name, data in self.build.patched.items():
            (part / name).write_bytes(data)
        self._save(targets)
        part.rename(self.path)

    def _write(self, name: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        patched, read = self.build.patched, self.build.upstream.read
        path.write_bytes(patched[name] if name in patched else read(name))

    def _link(self, links: list[str]) -> None:
        for folder, folders, files in os.walk(self.path):
            for path in (Path(folder, name) for name in folders + files):
                if path.is_symlink():
                    path.unlink()
        for name in links:
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(self.fork.root / name)

    def _save(self, targets: dict[str, str]) -> None:
        self.__dict__.pop("written", None)
        text = json.dumps({"files": targets}, indent=0)
        self._state_path.write_text(text, "utf-8")
