# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The wheel differs from upstream's in exactly the patched and the added files."""

import base64
import hashlib
import subprocess
import sys

import pytest

from forkbuild.backend import ROOT, prepare_build
from forkbuild.fork import ForkError
from forkbuild.trees import WheelTree


def proven_record(path) -> dict[str, str]:
    """RECORD of a wheel without dist-info, after hashing every file against it."""
    wheel = WheelTree(path)
    assert set(wheel.record) | {f"{wheel.dist_info}/RECORD"} == set(wheel.names)
    assert len(wheel.zip.namelist()) == len(wheel.names)
    for name, (digest, size) in wheel.record.items():
        data = wheel.read(name)
        sha = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        assert (digest, size) == (f"sha256={sha.rstrip('=')}", len(data)), name
    return {
        name: digest
        for name, (digest, _) in wheel.record.items()
        if not name.startswith(wheel.dist_info)
    }


def check_difference(build, folder) -> None:
    ours = proven_record(folder / build.write_wheel(folder))
    theirs = {
        name: digest
        for name, (digest, _) in build.upstream.record.items()
        if not name.startswith(build.upstream.dist_info)
    }
    changed = {name for name in theirs if ours.get(name) != theirs[name]}
    assert changed == {patch.target for patch in build.patches}
    assert ours.keys() - theirs.keys() == set(build.overlay)


def test_small_wheel_differs_in_patched_and_added_files_only(small_fork, tmp_path):
    small_fork.patch()
    small_fork.write("vllm/fp8_inc/__pycache__/kernel.nbi", "no")
    build = small_fork.build()
    check_difference(build, tmp_path)
    wheel = WheelTree(tmp_path / build.wheel_name)
    assert b"line_10 = 11\n" in wheel.read("vllm/config.py")
    assert not [name for name in wheel.names if "__pycache__" in name]


def test_real_wheel_differs_in_patched_and_added_files_only(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    check_difference(prepare_build(ROOT), tmp_path)


def test_equal_input_gives_an_equal_wheel(small_fork, tmp_path):
    contents = []
    for _ in range(2):
        build = small_fork.build()
        contents.append((tmp_path / build.write_wheel(tmp_path)).read_bytes())
    assert contents[0] == contents[1]
    entries = WheelTree(tmp_path / build.wheel_name).zip.infolist()
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}


def test_gaudi_wheel_has_no_compiled_file(small_fork, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "gaudi")
    name = small_fork.build().write_wheel(tmp_path)
    assert name == "vllm-0.28.0+gaudi.fp8inc.1-py3-none-any.whl"
    ours = proven_record(tmp_path / name)
    theirs = proven_record(small_fork.wheel)
    assert theirs.keys() - ours.keys() == {"vllm/_C.abi3.so"}


def test_an_unknown_device_is_an_error(small_fork, monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    with pytest.raises(ForkError, match="'tpu'.*cpu, gaudi"):
        small_fork.build()


def test_a_failed_build_leaves_no_wheel(small_fork, tmp_path):
    small_fork.patch(text="no patch at all")
    with pytest.raises(ForkError, match="ten.patch"):
        small_fork.build().write_wheel(tmp_path)
    assert not list(tmp_path.glob("*.whl*"))


def test_pip_installs_the_small_wheel_through_the_backend(small_fork, tmp_path):
    small_fork.patch()
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--quiet", "--target", str(tmp_path / "site")]
    subprocess.run([*command, str(small_fork.root)], check=True)
    code = "from vllm.config import line_10; from importlib.metadata import version; "
    code += "print(line_10, version('vllm'))"
    environ = {"PYTHONPATH": str(tmp_path / "site")}
    out = subprocess.check_output([sys.executable, "-c", code], env=environ, cwd="/")
    assert out.decode().split() == ["11", "0.28.0+cpu.fp8inc.1"]


def test_pip_shows_an_error_without_a_traceback(small_fork, tmp_path):
    small_fork.write("vllm/config.py", "")
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(tmp_path), str(small_fork.root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode
    assert "error: vllm/config.py: upstream has this file too" in result.stderr
    assert "Traceback" not in result.stderr
