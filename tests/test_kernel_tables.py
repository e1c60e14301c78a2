# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The tables of docs/kernels.md are those of the measurements."""

import json

from benchmarks import kernel_tables


def test_the_page_is_current():
    text = kernel_tables.PAGE.read_text()
    results = json.loads(kernel_tables.RESULTS.read_text())
    assert kernel_tables.page(text, results) == text


def test_a_ratio_stands_where_its_row_says():
    rows = [
        {"table": "GQA decode", "batch": 8, "context": 512, "threads": 1, "ratio": 1.5},
        {"table": "GQA decode", "batch": 1, "context": 2048, "threads": 1, "ratio": 2},
    ]
    machine = {"cpu": "a CPU", "features": "AVX2", "cores": 2}
    text = kernel_tables.render({"machine": machine, "rows": rows})
    assert "| context | batch 1 | batch 8 |" in text
    assert "| 512 |  | 1.5 |\n| 2048 | 2 |  |" in text
