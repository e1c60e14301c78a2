# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Variables of a Gaudi deployment on a CPU."""

import pytest

from vllm.fp8_inc.environment import check_on_cpu


def test_hpu_variables_are_named_in_one_line(caplog_vllm):
    check_on_cpu(
        {"PT_HPU_LAZY_MODE": "0", "VLLM_CONTIGUOUS_PA": "true", "PATH": "/bin"}
    )
    assert caplog_vllm.messages == [
        "fp8_inc: for HPU only, no effect on CPU: "
        "['PT_HPU_LAZY_MODE', 'VLLM_CONTIGUOUS_PA']"
    ]


def test_nothing_to_say(caplog_vllm):
    check_on_cpu({"PATH": "/bin"})
    assert not caplog_vllm.messages


def test_quant_config_is_not_dropped_in_silence():
    with pytest.raises(ValueError, match=r"QUANT_CONFIG=/a/quant\.json"):
        check_on_cpu({"QUANT_CONFIG": "/a/quant.json"})
