# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes safetensors files that the library itself would not write."""

import json
import struct
from pathlib import Path
from typing import Any

NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"


def entry(
    dtype: str = "F32", shape: tuple[int, ...] = (1,), offsets=(0, 4)
) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def raw(
    header: object, data: bytes = bytes(8), length: int | None = None, name: str = NAME
):
    """A builder of a file with this header, the length of which may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()

    def build(folder: Path) -> None:
        size = struct.pack("<Q", len(text) if length is None else length)
        (folder / name).write_bytes(size + text + data)

    return build


def content(data: bytes, name: str = NAME):
    """A builder of a file with this content."""
    return lambda folder: (folder / name).write_bytes(data)


def cut(size: int, name: str = NAME):
    """A builder that keeps the first bytes of a file; all but some if negative."""

    def build(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return build


def index(weight_map: object, name: str = INDEX):
    """A builder of an index."""
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    return lambda folder: (folder / name).write_text(text)
