# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Defects of the worker's own layers: there without our patches, gone with them."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.hpu.worker import ROOT, environment, needs_worker, watched

pytestmark = needs_worker
INSIDE = "tests/hpu/inside_worker_layers.py"


def outcomes(folder: Path, patched: bool) -> tuple[dict[str, bool], str]:
    """Whether each test passes, and what pytest wrote."""
    report = folder / "report.xml"
    _, log = watched(
        [
            *[sys.executable, "-m", "pytest", "-q", "--noconftest"],
            *[f"--junitxml={report}", INSIDE],
        ],
        environment(patched, SOFT_GAUDI="gaudi3"),
        ROOT,
    )
    assert report.is_file(), log[-8000:]
    cases = ElementTree.parse(report).iter("testcase")
    return {case.get("name"): not len(case) for case in cases}, log


@pytest.mark.parametrize("patched", [True, False])
def test_patches_decide(patched, tmp_path):
    found, log = outcomes(tmp_path, patched)
    assert len(found) >= 6
    assert set(found.values()) == {patched}, log[-8000:]
