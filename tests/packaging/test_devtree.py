# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""build/dev: overlay edits are live, and no edit of a patched file is lost."""

import subprocess
import sys

import pytest

from forkbuild.devtree import DevTree
from forkbuild.fork import ForkError
from forkbuild.trees import WheelTree


def evaluate(tree, module: str, name: str) -> str:
    """Imports from a development tree as a new process does."""
    code = f"import {module} as m; print(m.{name})"
    command = [sys.executable, "-B", "-c", code]
    environ = {"PYTHONPATH": str(tree)}
    return subprocess.check_output(command, env=environ, cwd="/", text=True).strip()


def test_edits_and_new_files_of_the_overlay_are_live(small_fork):
    small_fork.patch()
    tree = DevTree(small_fork.build()).refresh()
    assert evaluate(tree, "vllm.config", "line_10") == "11"
    assert evaluate(tree, "vllm.fp8_inc", "ANSWER") == "1"
    small_fork.write("vllm/fp8_inc/__init__.py", "ANSWER = 22\n")
    small_fork.write("vllm/fp8_inc/new.py", "ANSWER = 3\n")
    assert evaluate(tree, "vllm.fp8_inc", "ANSWER") == "22"
    assert evaluate(tree, "vllm.fp8_inc.new", "ANSWER") == "3"
    assert (tree / "vllm/_C.abi3.so").stat().st_size == 256 * 64


def test_a_file_in_a_folder_of_upstream_is_linked_alone(small_fork):
    path = small_fork.write("vllm/cli/scales.py", "ANSWER = 4\n")
    tree = DevTree(small_fork.build()).refresh()
    assert (tree / "vllm/cli/scales.py").is_symlink()
    assert not (tree / "vllm/cli").is_symlink()
    assert evaluate(tree, "vllm.cli.scales", "ANSWER") == "4"
    path.unlink()
    DevTree(small_fork.build()).refresh()
    assert not (tree / "vllm/cli/scales.py").is_symlink()


def test_the_editable_wheel_holds_the_path_and_the_metadata(small_fork, tmp_path):
    build = small_fork.build()
    name = build.write_editable_wheel(tmp_path, DevTree(build).refresh())
    wheel = WheelTree(tmp_path / name)
    files = {n for n in wheel.names if not n.startswith(wheel.dist_info)}
    (pth,) = files
    assert pth.endswith(".pth")
    assert wheel.read(pth).decode() == f"{small_fork.root}/build/dev\n"
    assert b"Name: vllm\n" in wheel.read(f"{wheel.dist_info}/METADATA")


def test_refresh_follows_the_patches(small_fork):
    tree = DevTree(small_fork.build()).refresh()
    assert "line_10 = 10\n" in (tree / "vllm/config.py").read_text()
    path = small_fork.patch()
    DevTree(small_fork.build()).refresh()
    assert "line_10 = 11\n" in (tree / "vllm/config.py").read_text()
    path.unlink()
    (small_fork.root / "patches/vllm/series").write_text("")
    DevTree(small_fork.build()).refresh()
    assert "line_10 = 10\n" in (tree / "vllm/config.py").read_text()


@pytest.mark.parametrize("name", ["vllm/config.py", "vllm/__init__.py", "vllm/mine.py"])
def test_refresh_loses_no_edit(name, small_fork):
    small_fork.patch()
    tree = DevTree(small_fork.build()).refresh()
    (tree / name).write_text("edited = 1\n")
    with pytest.raises(ForkError, match=f"{name}: edited, and no patch"):
        DevTree(small_fork.build()).refresh()
    assert (tree / name).read_text() == "edited = 1\n"


def test_refresh_takes_another_upstream_wheel(small_fork):
    tree = DevTree(small_fork.build()).refresh()
    small_fork.upstream({"vllm/__init__.py": b"", "vllm/other.py": b"ANSWER = 5\n"})
    DevTree(small_fork.build()).refresh()
    assert evaluate(tree, "vllm.other", "ANSWER") == "5"
    assert not (tree / "vllm/config.py").exists()


def test_devices_change_the_compiled_files_only(small_fork, monkeypatch):
    tree = DevTree(small_fork.build()).refresh()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "gaudi")
    DevTree(small_fork.build()).refresh()
    assert not (tree / "vllm/_C.abi3.so").exists()
    assert (tree / "vllm/config.py").exists()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    DevTree(small_fork.build()).refresh()
    assert (tree / "vllm/_C.abi3.so").exists()
