# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Puts wheels together: upstream's files, the patched ones, the overlay, dist-info."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forkbuild.fork import Fork
from forkbuild.metadata import edit_entry_points, edit_metadata, wheel_file
from forkbuild.overlay import check_overlay, overlay_files
from forkbuild.patchset import Patch, load_series, patched_files
from forkbuild.trees import WheelTree
from forkbuild.wheelfile import WheelWriter


@dataclass(frozen=True)
class Build:
    """All that goes into a wheel of the fork.

    Attributes:
        fork: The repository.
        upstream: The upstream wheel, already verified.
        device: `cpu`, or `gaudi`, whose wheel has no compiled files.
        tags: Compatibility tags of the upstream wheel.
    """

    fork: Fork
    upstream: WheelTree
    device: str
    tags: str

    @property
    def dist_info(self) -> str:
        """The name of the wheel's dist-info folder."""
        return f"vllm-{self.fork.version(self.device)}.dist-info"

    @property
    def wheel_tags(self) -> str:
        """The compatibility tags of the fork's wheel."""
        return self.tags if self.device == "cpu" else "py3-none-any"

    @property
    def wheel_name(self) -> str:
        """The wheel's file name."""
        return f"vllm-{self.fork.version(self.device)}-{self.wheel_tags}.whl"

    @cached_property
    def patches(self) -> list[Patch]:
        """patches/vllm in series order."""
        return load_series(self.fork.root / "patches" / "vllm")

    @cached_property
    def patched(self) -> dict[str, bytes]:
        """The upstream files that patches change, as changed."""
        return patched_files(self.patches, self.upstream)

    @cached_property
    def overlay(self) -> dict[str, Path]:
        """The files that the fork adds; none of them is an upstream file."""
        overlay = overlay_files(self.fork.root)
        check_overlay(overlay, self.upstream.names)
        return overlay

    @cached_property
    def upstream_files(self) -> list[str]:
        """The upstream files of this device's wheel, dist-info left out, sorted."""
        skip = (".so",) if self.device == "gaudi" else ()
        own = f"{self.upstream.dist_info}/"
        names = (name for name in self.upstream.record if not name.startswith(own))
        return sorted(name for name in names if not name.endswith(skip))

    @cached_property
    def dist_info_files(self) -> dict[str, bytes]:
        """The files of the dist-info folder, without RECORD."""
        old = f"{self.upstream.dist_info}/"
        files = {
            name.removeprefix(old): self.upstream.read(name)
            for name in self.upstream.record
            if name.startswith(old)
        }
        metadata = files["METADATA"].decode("utf-8")
        points = files["entry_points.txt"].decode("utf-8")
        texts = {
            "METADATA": edit_metadata(self.fork, self.device, metadata),
            "entry_points.txt": edit_entry_points(self.fork, points),
            "WHEEL": wheel_file(self.wheel_tags, pure=self.device == "gaudi"),
        }
        files |= {name: text.encode("utf-8") for name, text in texts.items()}
        files["licenses/NOTICE"] = (self.fork.root / "NOTICE").read_bytes()
        return files

    def write_wheel(self, folder: Path) -> str:
        """Writes the wheel into a folder; returns its file name."""
        patched, overlay = self.patched, self.overlay  # errors before the writing
        with WheelWriter(folder / self.wheel_name, self.dist_info) as wheel:
            for name in self.upstream_files:
                if name in patched:
                    wheel.add(name, patched[name])
                else:
                    info = self.upstream.zip.getinfo(name)
                    wheel.copy(self.upstream.zip, info, self.upstream.record[name])
            for name, path in overlay.items():
                wheel.add(name, path.read_bytes())
            self._add_dist_info(wheel)
        return self.wheel_name

    def write_editable_wheel(self, folder: Path, tree: Path) -> str:
        """Writes a wheel that puts a development tree on Python's path."""
        with WheelWriter(folder / self.wheel_name, self.dist_info) as wheel:
            wheel.add("__editable__vllm_fp8inc.pth", f"{tree}\n".encode())
            self._add_dist_info(wheel)
        return self.wheel_name

    def write_dist_info(self, folder: Path) -> str:
        """Writes the dist-info folder (without RECORD); returns its name."""
        for name, data in self.dist_info_files.items():
            path = folder / self.dist_info / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.dist_info

    def _add_dist_info(self, wheel: WheelWriter) -> None:
        for name, data in self.dist_info_files.items():
            wheel.add(f"{self.dist_info}/{name}", data)
