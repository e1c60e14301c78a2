# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Variables of a Gaudi deployment are pointed out on a CPU."""

from vllm.fp8_inc.environment import report_on_cpu


def test_variables_without_effect_are_named(caplog_vllm):
    report_on_cpu(
        {"PT_HPU_LAZY_MODE": "1", "HABANA_VISIBLE_DEVICES": "all", "PATH": "/bin"}
    )
    (line,) = [m for m in caplog_vllm.messages if m.startswith("fp8_inc:")]
    assert "HABANA_VISIBLE_DEVICES" in line and "PT_HPU_LAZY_MODE" in line
    assert "PATH" not in line


def test_nothing_is_said_without_them(caplog_vllm):
    report_on_cpu({"PATH": "/bin", "QUANT_CONFIG": "/a/quant.json"})
    assert "fp8_inc" not in caplog_vllm.text
