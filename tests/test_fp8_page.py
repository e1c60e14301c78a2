# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""docs/fp8-on-gaudi.md: its messages, its codes and its chart are those of the code."""

import ast
import math
import re
from pathlib import Path

import ml_dtypes
import numpy
import pytest

from benchmarks import decision_chart

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "fp8-on-gaudi.md").read_text()
DIFFERS = "\0"


def section(name: str) -> str:
    return PAGE.split(f"<!-- {name}:begin -->\n")[1].split(f"<!-- {name}:end -->")[0]


def rows(name: str) -> list[list[str]]:
    """The cells of a table, without its two head lines."""
    lines = section(name).strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def said(tree: ast.AST) -> list[str]:
    """Every string of a module; what is put in when it runs is one character."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else DIFFERS
                for part in node.values
            ]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%\.?\d*[sdgr]", DIFFERS, node.value))
    return found


@pytest.fixture(scope="module")
def messages() -> list[str]:
    files = (ROOT / "vllm" / "fp8_inc").rglob("*.py")
    return [text for file in files for text in said(ast.parse(file.read_text()))]


def quoted() -> list[str]:
    return [row[0].strip("`") for row in rows("messages")]


@pytest.mark.parametrize("message", quoted())
def test_a_message_is_in_the_code(messages, message):
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert max(map(len, parts)) > 15, "too short to tell it apart"
    pattern = ".*".join(map(re.escape, parts))
    assert any(re.search(pattern, text, re.S) for text in messages)


def test_a_message_that_no_code_has_is_noticed(messages):
    assert not any("scales may be wrong somehow" in text for text in messages)


def shown(value: float) -> str:
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    return f"{value:g}"


def test_the_codes_are_those_of_ml_dtypes():
    formats = [
        ml_dtypes.float8_e4m3,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
    ]
    table = {name: cells for name, *cells in rows("codes")}
    codes = {name: cells for name, cells in table.items() if name.startswith("code")}
    assert len(codes) == 6
    for name, cells in codes.items():
        code = numpy.array([int(name.split()[1], 16)], numpy.uint8)
        assert cells == [shown(float(code.view(f)[0])) for f in formats]
    largest = [f"{float(ml_dtypes.finfo(f).max):g}" for f in formats]
    assert table["largest number"] == largest
    smallest = [ml_dtypes.finfo(f).smallest_subnormal for f in formats]
    exponents = [f"2^{int(math.log2(float(x)))}" for x in smallest]
    assert table["smallest above 0"] == exponents


def test_the_chart_is_current():
    assert decision_chart.SVG.read_text() == decision_chart.svg()
    assert section("chart") == decision_chart.text() + "\n"


def test_no_word_leaves_its_box():
    """At 13 pixels a letter is some 6.6 wide, in monospace at 12 pixels 7.3."""
    for step in decision_chart.STEPS:
        assert len(step.question) * 6.6 < 310 and len(step.command) * 7.3 < 310
        assert len(step.outcome) * 6.6 < 390 and len(step.way) * 7.3 < 390
