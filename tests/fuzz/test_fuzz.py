# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Whatever a file holds: ValueError or an answer, no other exception, no hang.

Each target runs a few examples in every test run, and for FUZZ_SECONDS where that is
set (`make fuzz`). What it found before is in ``tests/faults``.
"""

import contextlib
import os
import resource
import signal
import time

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.targets import TARGETS, Target

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
_FEW = 40  # examples of a short run
_MANY = 300  # of a round of a long one
_SLOWEST = 20  # seconds for one example: a hang
_GIB = 1 << 30


@contextlib.contextmanager
def no_hang():
    """An example that takes too long raises; pytest-timeout's timer is off then."""

    def late(*_: object) -> None:
        raise AssertionError(f"it took more than {_SLOWEST} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SLOWEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(target: Target, examples: int, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def check(drawn: object) -> None:
        with no_hang(), contextlib.suppress(ValueError):
            target.run(drawn)

    check()


def memory() -> int:
    """The largest the process ever was, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", TARGETS)
def test_only_value_error(name, capfd):
    run(TARGETS[name], _FEW, 0)
    before, deadline = memory(), time.monotonic() + SECONDS
    number = int.from_bytes(os.urandom(4), "big")
    while time.monotonic() < deadline:
        number += 1
        run(TARGETS[name], _MANY, number)
        capfd.readouterr()
    assert memory() - before < _GIB
