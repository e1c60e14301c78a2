# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The importable copy of the HPU worker, and the way back into the patches."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from tests.packaging.conftest import CONFIG, TEN, patch_text

_PATH = Path(__file__).resolve().parents[2] / "tools" / "patches.py"
SETUP = """\
from setuptools import setup
raise SystemExit("must not run")
setup(
    entry_points={
        "vllm.platform_plugins": ["hpu = vllm_gaudi:register"],
        "vllm.general_plugins": ["01.ops = vllm_gaudi:register_ops"],
        "pytest11": ["compat = pytest_compat"],
    },
)
"""


@pytest.fixture
def checkout(small_fork, tmp_path):
    """A checkout of vllm-gaudi, with a patch for it in the fork."""
    text = patch_text("vllm_gaudi/config.py", TEN)
    small_fork.write("patches/vllm_gaudi/ten.patch", text)
    small_fork.write("patches/vllm_gaudi/series", "ten.patch\n")
    package = tmp_path / "gaudi" / "vllm_gaudi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text(CONFIG)
    (package.parent / "setup.py").write_text(SETUP)
    return package.parent


@pytest.fixture
def cli(small_fork, capsys):
    spec = importlib.util.spec_from_file_location("patches_tool", _PATH)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def run(*args: object) -> tuple[int, str]:
        code = tool.main([str(arg) for arg in args], small_fork.root)
        output = capsys.readouterr()
        return code, output.out + output.err

    return run


def test_the_copy_is_patched_and_has_the_entry_points_of_vllm(checkout, cli, tmp_path):
    out = tmp_path / "worker"
    assert cli("worker", checkout, out)[0] == 0
    assert "line_10 = 11" in (out / "vllm_gaudi/config.py").read_text()
    (found,) = importlib.metadata.distributions(path=[str(out)])
    assert {(entry.group, entry.name, entry.value) for entry in found.entry_points} == {
        ("vllm.platform_plugins", "hpu", "vllm_gaudi:register"),
        ("vllm.general_plugins", "01.ops", "vllm_gaudi:register_ops"),
    }


def test_an_unpatched_copy_takes_the_place_of_a_patched_one(checkout, cli, tmp_path):
    out = tmp_path / "worker"
    cli("worker", checkout, out)
    assert cli("worker", checkout, out, "--unpatched")[0] == 0
    assert (out / "vllm_gaudi/config.py").read_text() == CONFIG
    assert [path.name for path in tmp_path.glob("worker*")] == ["worker"]


def test_a_folder_without_the_worker_is_refused(cli, tmp_path, checkout):
    code, text = cli("worker", tmp_path, tmp_path / "worker")
    assert code == 1 and "no checkout of vllm-gaudi" in text


def test_edits_of_the_copy_become_the_patch(checkout, cli, tmp_path, small_fork):
    out = tmp_path / "worker"
    cli("worker", checkout, out)
    assert cli("export", "--check", "--worker", checkout, out)[0] == 0
    path = out / "vllm_gaudi/config.py"
    path.write_text(path.read_text().replace("line_10 = 11", "line_10 = 12"))
    assert cli("export", "--check", "--worker", checkout, out)[0] == 1
    assert cli("export", "--worker", checkout, out)[0] == 0
    patch = small_fork.root / "patches/vllm_gaudi/ten.patch"
    assert "+line_10 = 12" in patch.read_text()


def test_an_edit_that_no_patch_owns_is_refused(checkout, cli, tmp_path):
    out = tmp_path / "worker"
    cli("worker", checkout, out)
    (out / "vllm_gaudi/__init__.py").write_text("X = 1\n")
    code, text = cli("export", "--worker", checkout, out)
    assert code == 1 and "vllm_gaudi/__init__.py: changed" in text
