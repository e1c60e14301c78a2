# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""torch.ops.hpu.* in software for every test of this folder."""

import pytest

from tests.device_numbers import MAXIMUM
from vllm.fp8_inc import hpu_ops


@pytest.fixture(scope="session", autouse=True)
def operators():
    assert hpu_ops.register()


@pytest.fixture(params=list(MAXIMUM))
def device(request):
    """The name of the emulated device."""
    with hpu_ops.emulate(request.param):
        yield request.param
