# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The software Gaudi by itself, without a worker.

Its device is put into PyTorch for good, hence a process of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSIDE = "tests/hpu/inside_software_gaudi.py"


@pytest.mark.parametrize("chip", ["gaudi2", "gaudi3"])
@pytest.mark.parametrize(
    "tensors", ["cpu", pytest.param("hpu", marks=pytest.mark.slow)]
)
def test_the_device(chip, tensors):
    """The device in C++ is slow because it may have to be built."""
    if tensors == "hpu" and not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(ROOT / "software_gaudi"), inherited]))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", INSIDE],
        env=os.environ
        | {"PYTHONPATH": path, "SOFT_GAUDI": chip, "SOFT_GAUDI_TENSORS": tensors},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
    assert " passed" in process.stdout
