# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which Gaudi is simulated, from the environment."""

import os

CHIP_ENV = "SOFT_GAUDI"
MEMORY_ENV = "SOFT_GAUDI_MEMORY"
TENSORS_ENV = "SOFT_GAUDI_TENSORS"
_CHIPS = ("gaudi2", "gaudi3")
_TENSORS = ("", "hpu", "cpu")


def chip() -> str:
    """The chip: SOFT_GAUDI, or gaudi3.

    Raises:
        ValueError: For a chip that is not known.
    """
    name = os.environ.get(CHIP_ENV, "gaudi3").lower()
    if name not in _CHIPS:
        raise ValueError(f"{CHIP_ENV}={name}: use one of {', '.join(_CHIPS)}")
    return name


def tensors() -> str:
    """Which device tensors for hpu name: SOFT_GAUDI_TENSORS; "": hpu if it can be.

    Raises:
        ValueError: For another device.
    """
    device = os.environ.get(TENSORS_ENV, "")
    if device not in _TENSORS:
        raise ValueError(f"{TENSORS_ENV}={device}: use hpu or cpu, or leave it out")
    return device


def memory_bytes() -> int:
    """Size of the device memory, of which the worker takes a share for its cache."""
    return int(os.environ.get(MEMORY_ENV, 256 << 20))


def is_lazy() -> bool:
    """Whether the worker runs in lazy mode; nothing is deferred here."""
    return os.environ.get("PT_HPU_LAZY_MODE", "0") == "1"
