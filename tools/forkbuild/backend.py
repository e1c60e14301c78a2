# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The build backend (PEP 517, PEP 660) that pip calls for `pip install [-e] .`.

In-tree and not setuptools: nothing is compiled or collected here; the wheel is
upstream's, patched.
"""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (no [project] table to say it in)
    raise SystemExit("error: this fork needs Python 3.11 or newer")

from forkbuild.build import Build
from forkbuild.devtree import DevTree
from forkbuild.fork import Fork, ForkError, target_device
from forkbuild.trees import WheelTree
from forkbuild.upstream import upstream_wheel

ROOT = Path(__file__).resolve().parents[2]


class UnsupportedOperation(Exception):
    """What PEP 517 has a backend raise that makes no source distribution."""


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Shows pip's user what is wrong, without a traceback."""
    try:
        yield
    except ForkError as error:
        raise SystemExit(f"error: {error}") from None


def prepare_build(root: Path = ROOT) -> Build:
    """Gets the upstream wheel and gathers what goes into the fork's wheel."""
    fork = Fork(root)
    device = target_device(os.environ)
    tags = fork.wheel_pin(platform.machine()).tags
    return Build(fork, WheelTree(upstream_wheel(fork)), device, tags)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the wheel; returns its file name."""
    with _plain_errors():
        return prepare_build().write_wheel(Path(wheel_directory))


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Makes or refreshes build/dev, and a wheel that points to it."""
    with _plain_errors():
        build = prepare_build()
        tree = DevTree(build).refresh()
        return build.write_editable_wheel(Path(wheel_directory), tree)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Writes the dist-info folder, so that pip knows the requirements early."""
    with _plain_errors():
        return prepare_build().write_dist_info(Path(metadata_directory))


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(sdist_directory, config_settings=None):
    """Refuses: the repository itself is the source."""
    raise UnsupportedOperation("no source distribution; run `python -m build --wheel`")
