# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""torch.ops.hpu.* in software, with the exact numbers of Gaudi2 and Gaudi3.

``register()`` defines the FP8 operators of Intel's bridge on CPU. Where the bridge
itself is loaded it does nothing: the same calls then run on the device. Which device
is emulated is set explicitly, by ``set_device`` or ``emulate``.
"""

from vllm.fp8_inc.hpu_ops.byte_counter import ByteCounter
from vllm.fp8_inc.hpu_ops.emulation import emulate, emulated_format, set_device
from vllm.fp8_inc.hpu_ops.registration import register

__all__ = ["ByteCounter", "emulate", "emulated_format", "register", "set_device"]
