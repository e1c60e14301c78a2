# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which Gaudi the software operators compute as."""

import contextlib
from collections.abc import Iterator

from vllm.fp8_inc.formats import FORMATS, Fp8Format

_format: Fp8Format | None = None


def set_device(device: str) -> None:
    """Chooses the device of this process.

    Args:
        device: "gaudi2" or "gaudi3".

    Raises:
        ValueError: For any other name.
    """
    global _format
    if device not in FORMATS:
        raise ValueError(f"device {device!r}: known are {sorted(FORMATS)}")
    _format = FORMATS[device]


def emulated_format() -> Fp8Format:
    """The number format of the chosen device.

    Raises:
        RuntimeError: If none was chosen; a wrong guess would be a wrong number.
    """
    if _format is None:
        raise RuntimeError(
            "torch.ops.hpu in software: choose the device first, with "
            'vllm.fp8_inc.hpu_ops.set_device("gaudi2" or "gaudi3")'
        )
    return _format


@contextlib.contextmanager
def emulate(device: str) -> Iterator[Fp8Format]:
    """Chooses the device within a ``with`` block."""
    global _format
    before = _format
    set_device(device)
    try:
        yield emulated_format()
    finally:
        _format = before
