# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The end-to-end table says of each arm what was measured of it."""

from benchmarks.serving_page import render

SETTINGS = {"cpu": "CPU", "layers": 2, "output_tokens": 16, "threads": "1"}


def arm(throughput, ratio=None):
    row = {"output_throughput": throughput}
    return row if ratio is None else row | {"fp8_inc_ratio": ratio}


def test_each_arm_is_in_its_column():
    rows = {
        "512 x 8": {
            "turns": 3,
            "fp8_inc": arm(30.5),
            "bf16": arm(20.25, 1.51),
            "stock": arm(10.125, 3.01),
        },
        "4096 x 1": {"turns": 2, "fp8_inc": arm(4.5), "bf16": arm(4.0, 1.13)},
        "KV tokens a GiB": {"fp8_inc": 200, "bf16": 100},
    }
    text = render({"settings": SETTINGS, "rows": rows})
    assert "| 512 | 8 | 30.5 | 20.25 | 10.125 | 1.51 | 3.01 | 3 |" in text
    assert "| 4096 | 1 | 4.5 | 4.0 |  | 1.13 |  | 2 |" in text
    assert "KV tokens a GiB: fp8_inc 200, bf16 100." in text


def test_nothing_measured_gives_no_table():
    assert "|" not in render({"settings": SETTINGS, "rows": {}})
