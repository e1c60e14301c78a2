# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Which number format the HPU of this process computes with."""

import sys

from vllm.fp8_inc.formats import GAUDI2, GAUDI3, Fp8Format
from vllm.fp8_inc.hpu_ops import emulated_format


def hpu_format() -> Fp8Format:
    """Asks Intel's bridge for the device; without it, the emulated one.

    Raises:
        RuntimeError: For a device that is neither Gaudi2 nor Gaudi3, or without
            bridge and without ``hpu_ops.set_device``.
    """
    if "habana_frameworks" not in sys.modules:
        return emulated_format()
    from habana_frameworks.torch.utils import experimental

    device = experimental._get_device_type()
    kinds = experimental.synDeviceType
    formats = {kinds.synDeviceGaudi2: GAUDI2, kinds.synDeviceGaudi3: GAUDI3}
    if device not in formats:
        raise RuntimeError(
            f"--kv-cache-dtype fp8_inc knows the FP8 numbers of Gaudi2 and Gaudi3, "
            f"not of device type {device}; serve with --kv-cache-dtype auto"
        )
    return formats[device]
