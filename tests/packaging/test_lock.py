# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A lock has a hash of everything, and is what pyproject.toml asks for."""

import re
import tomllib

import pytest

from lock import ROOT, lock_lines, pins_of, stale_pins


def test_a_lock_has_a_hash_of_everything_but_the_fork():
    def item(name, **info):
        return {
            "metadata": {"name": name, "version": "1.5"},
            "download_info": {"url": f"https://x/{name}", **info},
        }

    hashed = {"archive_info": {"hashes": {"sha256": "ab"}}}
    report = {"install": [item("Torch", **hashed), item("vllm", dir_info={})]}
    assert lock_lines(report) == ["torch==1.5 --hash=sha256:ab"]
    report["install"].append(item("other", vcs_info={}))
    with pytest.raises(ValueError, match="other comes from https://x/other"):
        lock_lines(report)


def test_the_lock_is_current_and_names_no_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = (ROOT / "requirements.lock").read_text()
    assert not stale_pins(lock, pins_of(project["tool"]["fork"]))
    for line in lock.splitlines()[1:]:
        assert re.fullmatch(r"[a-z0-9._-]+==[\w.+]+ --hash=sha256:[0-9a-f]{64}", line)


def test_a_lock_that_pyproject_left_behind_is_stale():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = pins_of(project["tool"]["fork"])
    assert "torch==2.13.0" in pins and any(pin.startswith("ruff==") for pin in pins)
    pins = ["torch==2.13.0", "ml_dtypes==0.6.0", 'numba==1; platform_machine == "x"']
    current = "torch==2.13.0+cpu --hash=sha256:ab\nml-dtypes==0.6.0 --hash=sha256:cd\n"
    assert not stale_pins(current, pins)
    assert stale_pins(current.replace("2.13", "2.12"), pins) == [
        "torch: pyproject.toml has torch==2.13.0, the lock 2.12.0+cpu"
    ]
    assert "ml_dtypes" in stale_pins(current.splitlines()[0], pins)[0]
