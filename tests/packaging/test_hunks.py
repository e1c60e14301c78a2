# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Diffs: exact application, round trips, GNU patch and git as independent readers."""

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkbuild.fork import ForkError
from forkbuild.hunks import apply_hunks, format_hunks, make_hunks, parse_hunks

LINES = "".join(f"{number}\n" for number in range(1, 21))
lines = st.lists(st.sampled_from(["a", "b", "c", "", "-- x", "\f", "d\r"]), max_size=12)
texts = st.builds(
    lambda rows, end: "\n".join(rows) + end, lines, st.sampled_from(["\n", ""])
)


def apply(body: str, text: str = LINES) -> str:
    return apply_hunks(text, parse_hunks(body, "p"), "p: f")


@given(texts.filter(bool), texts)
@settings(max_examples=300, deadline=None)
def test_a_made_diff_turns_old_into_new_and_back_from_text(old, new):
    hunks = make_hunks(old, new)
    assert parse_hunks(format_hunks(hunks), "p") == hunks
    assert apply_hunks(old, hunks, "p") == new


def test_context_is_as_little_as_places_the_hunk():
    assert format_hunks(make_hunks("a\nb\nc\n", "a\nB\nc\n")) == (
        "@@ -2 +2 @@ a\n-b\n+B\n"
    )
    assert format_hunks(make_hunks("a\nb\n", "a\nx\nb\n")) == (
        "@@ -1,2 +1,3 @@\n a\n+x\n b\n"
    )
    assert format_hunks(make_hunks("a\nb\nc\nd\n", "a\nx\ny\nb\nc\nD\n")) == (
        "@@ -1,2 +1,4 @@\n a\n+x\n+y\n b\n@@ -4 +6 @@ c\n-d\n+D\n"
    )
    repeated = "x\na\ny\na\n"
    assert format_hunks(make_hunks(repeated, "x\nA\ny\na\n")) == (
        "@@ -1,3 +1,3 @@\n x\n-a\n+A\n y\n"
    )


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize(
    "new",
    [
        LINES.replace("7\n", "seven\n").replace("12\n", ""),
        "0\n" + LINES,
        LINES + "21",
        LINES.replace("3\n", "3\n3b\n").replace("19\n", ""),
    ],
)
def test_other_tools_read_our_diffs(tool, new, tmp_path):
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    (tmp_path / "f").write_text(LINES)
    diff = "--- a/f\n+++ b/f\n" + format_hunks(make_hunks(LINES, new))
    command = {
        "patch": ["patch", "-p1", "--fuzz=0"],
        "git": ["git", "apply", "--unidiff-zero"],
    }[tool]
    subprocess.run(command, cwd=tmp_path, input=diff.encode(), check=True)
    assert (tmp_path / "f").read_text() == new


def test_a_hunk_moves_only_to_the_one_exact_place():
    body = "@@ -3,2 +3,2 @@\n 10\n-11\n+eleven\n"
    assert apply(body) == LINES.replace("11\n", "eleven\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@@ -10,2 +10,2 @@\n 10\n-eleven\n+11\n", "hunk 1 .line 10. matches nowhere"),
        # GNU patch takes this one with a fuzz of 1: one of three context lines is off.
        ("@@ -9,4 +9,4 @@\n nine\n 10\n-11\n+x\n 12\n", "hunk 1 .* matches nowhere"),
        ("@@ -1,1 +1,1 @@\n-1\n+x\n@@ -5,1 +5,1 @@\n-five\n+y\n", "hunk 2"),
        ("@@ -10,0 +11,1 @@\n+x\n", "give it one line of context"),
        ("@@ -10,2 +10,2 @@\n-10\n+x\n", "counts"),
        ("@@ -10,1 +10,1 @@\n-10\n+x\n-- \n2.30\n", "expected an @@ line"),
    ],
)
def test_what_does_not_match_exactly_is_refused(body, message):
    with pytest.raises(ForkError, match=message):
        apply(body)


def test_a_text_that_occurs_twice_is_refused_away_from_its_line():
    text = "a\nb\na\nb\n"
    assert apply("@@ -3,1 +3,1 @@\n-a\n+A\n", text) == "a\nb\nA\nb\n"
    with pytest.raises(ForkError, match="matches 2 times, but not at its own line"):
        apply("@@ -2 +2 @@ a\n-a\n+A\n", text)
