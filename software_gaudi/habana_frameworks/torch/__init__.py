# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The part of habana_frameworks.torch that vLLM's HPU worker uses."""

from soft_gaudi.install import install

install()

import torch  # noqa: E402, F401  (the worker's profiler takes torch from here)

from . import core, distributed, hpex, hpu, internal, utils  # noqa: E402, F401

# Last: it imports vllm, which may load the HPU platform, which imports this module.
from soft_gaudi import operators  # noqa: E402  # isort: skip

operators.install()
