# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The worker's own unit tests, unchanged, pass with our patches where they did without.

Those that concern compressed-tensors, fp8 and MoE. test_fsdpa_slicing.py tests modules
that no patch touches, over sequences that are too long for software.
"""

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.hpu.worker import CHECKOUT, environment, needs_worker, watched

pytestmark = needs_worker
FILES = (
    "ops/test_hpu_compressed_tensors.py",
    "ops/test_hpu_fp8.py",
    "ops/test_hpu_fused_moe.py",
    "worker/test_moe_gate_sync.py",
)


def passed(folder: Path, patched: bool) -> set[str]:
    """The names of the tests that pass."""
    report = folder / f"{patched}.xml"
    tests = Path(CHECKOUT) / "tests" / "unit_tests"
    variables = environment(patched, SOFT_GAUDI="gaudi2", PT_HPU_LAZY_MODE="1")
    variables["PYTHONPATH"] += os.pathsep + str(tests / "ops")
    _, log = watched(
        [
            *[sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
            *[f"--rootdir={tests}", "-c", os.devnull, f"--junitxml={report}"],
            *[str(tests / file) for file in FILES],
        ],
        variables,
        folder,
    )
    assert report.is_file(), log[-4000:]
    (folder / f"{patched}.log").write_text(log, "utf-8")
    return {
        f"{case.get('classname')}.{case.get('name')}"
        for case in ElementTree.parse(report).iter("testcase")
        if not len(case)  # no failure, error or skip inside
    }


@pytest.mark.slow
def test_no_unit_test_of_the_worker_breaks(tmp_path):
    before, after = (passed(tmp_path, patched) for patched in (False, True))
    assert not before - after
    modules = {name.split(".")[-2] for name in before}
    assert {Path(file).stem for file in FILES} <= modules
