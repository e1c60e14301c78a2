# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The environment of every test; set before vLLM or torch is imported."""

import os

# Engines run in the test process (tests/engines.py); server tests start their own.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# More threads than idle cores make OpenMP's barriers crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("VLLM_SCALE_ADJUSTMENT", None)

import logging

import pytest


@pytest.fixture
def caplog_vllm(caplog):
    """caplog with the records of vLLM's loggers, which do not propagate."""
    from vllm import logger as logs  # configures it, which drops handlers

    # What is said once a process may have been said in another test.
    for say in (
        logs._print_debug_once,
        logs._print_info_once,
        logs._print_warning_once,
    ):
        say.cache_clear()
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm"):
        yield caplog
    logger.removeHandler(caplog.handler)
