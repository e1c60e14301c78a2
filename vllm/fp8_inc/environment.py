# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Environment variables of a Gaudi deployment, met on a CPU."""

import os
from collections.abc import Mapping

from vllm.logger import init_logger

logger = init_logger(__name__)

_HPU_ONLY = ("PT_HPU_", "VLLM_CONTIGUOUS_PA", "HABANA_")


def report_on_cpu(environ: Mapping[str, str] = os.environ) -> None:
    """Names the variables that have no effect here, in one line."""
    without_effect = sorted(name for name in environ if name.startswith(_HPU_ONLY))
    if without_effect:
        logger.info("fp8_inc: for HPU only, no effect on CPU: %s", without_effect)
