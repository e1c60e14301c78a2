# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""docs/formats.md is what the table says."""

from pathlib import Path

from vllm.fp8_inc.sources.formats_page import main, page
from vllm.fp8_inc.sources.producers import PRODUCERS

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_page_of_the_repository_is_current():
    assert main([str(PAGE), "--check"]) == 0


def test_a_page_that_is_not_current_is_found_and_mended(tmp_path, capsys):
    path = tmp_path / "docs" / "formats.md"
    assert main([str(path), "--check"]) == 1
    assert main([str(path)]) == 0
    assert main([str(path), "--check"]) == 0
    path.write_text(path.read_text().replace("Quark", "Quork"))
    assert main([str(path), "--check"]) == 1
    assert "is not current; run python -m" in capsys.readouterr().err


def test_every_producer_has_one_row_of_seven_cells():
    rows = [line for line in page().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(PRODUCERS) + 1
    assert all(row.count(" | ") == 6 for row in rows)
    for producer in PRODUCERS:
        (row,) = [row for row in rows if row.startswith(f"| {producer.name} |")]
        assert all(f"`{name}`" in row for name in producer.tensors)
