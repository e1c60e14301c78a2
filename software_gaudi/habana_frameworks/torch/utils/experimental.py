# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The chip's type."""

import enum
from typing import Any

import torch
from soft_gaudi.chip import chip


class synDeviceType(enum.IntEnum):
    """The chips; the numbers are the original's."""

    synDeviceTypeInvalid = 0
    synDeviceGaudi = 1
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> synDeviceType:
    return synDeviceType[f"synDevice{chip().title()}"]


def _data_ptr(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _is_fp16_supported() -> bool:
    return True


def _set_is_dynamic_quantization(*args: Any, **kwargs: Any) -> None:
    pass
