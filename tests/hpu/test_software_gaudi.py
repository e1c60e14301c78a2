# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The software Gaudi by itself, without a worker.

Its device is put into PyTorch for good, hence a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSIDE = "tests/hpu/inside_software_gaudi.py"


@pytest.mark.parametrize("chip", ["gaudi2", "gaudi3"])
def test_the_device(chip):
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(ROOT / "software_gaudi"), inherited]))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", INSIDE],
        env=os.environ | {"PYTHONPATH": path, "SOFT_GAUDI": chip},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
    assert " passed" in process.stdout
