# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The tables of docs/kernels.md and README say of each row what was measured of it."""

from benchmarks import kernel_tables, speed_table


def test_a_ratio_stands_where_its_row_says():
    rows = [
        {"table": "GQA decode", "batch": 8, "context": 512, "threads": 1, "ratio": 1.5},
        {"table": "GQA decode", "batch": 1, "context": 2048, "threads": 1, "ratio": 2},
    ]
    machine = {"cpu": "a CPU", "features": "AVX2", "cores": 2}
    text = kernel_tables.render({"machine": machine, "rows": rows})
    assert "| context | batch 1 | batch 8 |" in text
    assert "| 512 |  | 1.5 |\n| 2048 | 2 |  |" in text


def test_readme_names_the_machine_and_what_was_measured():
    rows = [
        {"table": "MLA decode", "heads": h, "threads": t, "ratio": r}
        for h, t, r in ((16, 1, 2.0), (16, 1, 4.5), (16, 1, 3.0), (16, 2, 9.0))
    ]
    rows += [{"table": "MLA decode", "heads": 128, "threads": 1, "ratio": 7.0}]
    rows += [{"table": "GQA decode", "threads": 1, "ratio": 8.0}]
    machine = {"cpu": "a CPU", "features": "AVX2", "cores": 2}
    serving = {
        "KV tokens a GiB": {"fp8_inc": 300, "bf16": 150},
        "first token": {
            f"{context}_{name}_ms": value
            for context, name, value in (
                (512, "new", 1500.0),
                (512, "known", 40.0),
                (4096, "new", 9000.0),
                (4096, "known", 250.0),
            )
        },
    }
    serving = {"settings": {"layers": 2}, "rows": serving}
    text = speed_table.render({"machine": machine, "rows": rows}, serving)
    for line in (
        "| what | a CPU, AVX2, one thread |",
        "| tokens that a GiB of cache holds, over bf16 | 2.00 times |",
        "| MLA decode kernel, 16 heads, over upstream's bf16 | 3 times (2 to 4.5) |",
        "| MLA decode kernel, 128 heads, over upstream's bf16 | 7 times (7 to 7) |",
        "| first token of 512 tokens, all but 16 cached, 2 layers "
        "| 0.04 s instead of 1.5 s |",
        "| first token of 4096 tokens, all but 16 cached, 2 layers "
        "| 0.25 s instead of 9 s |",
    ):
        assert line in text
