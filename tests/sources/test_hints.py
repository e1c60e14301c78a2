# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Implausible scales are described with their numbers, others not."""

import pytest
import torch

from vllm.fp8_inc.sources.hints import implausible, rounded_to_bfloat16
from vllm.fp8_inc.sources.store import FoundScale


def found(*pairs):
    return {
        f"layers.{n}": {"k": FoundScale("k", k), "v": FoundScale("v", v)}
        for n, (k, v) in enumerate(pairs)
    }


@pytest.mark.parametrize(
    "pairs, expected",
    [
        ([(1.0, 1.0), (1.0, 1.0)], "1.0 in 2 of 2 layers"),
        ([(1.0, 1.0)], "1.0 in 1 of 1 layers"),
        ([(1.0, 1.7), (2.5, 3.5), (1.2, 1.0)], "1.0 in 2 of 3 layers"),
        ([(0.25, 0.5)] * 4, "all 4 layers have the same scales (k 0.25, v 0.5)"),
    ],
)
def test_what_no_calibration_gives_is_described(pairs, expected):
    assert expected in implausible(found(*pairs))


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(0.25, 0.5)],
        [(0.25, 0.5), (0.25, 0.25)],
        [(0.5, 0.25), (0.25, 0.5)],
        [(1.0, 0.5), (1.0, 1.0)],
        [(1.5, 2.5), (3.5, 4.5)],
    ],
)
def test_other_scales_pass_without_a_word(pairs):
    assert implausible(found(*pairs)) is None


def bf16(value):
    return torch.tensor(value).bfloat16().item()


@pytest.mark.parametrize(
    "pairs, said",
    [
        ([(bf16(0.011), bf16(0.037)), (bf16(0.3), 0.25)], True),
        ([(bf16(0.011), 0.037), (bf16(0.3), 0.25)], False),
        ([(0.25, 0.5), (2.0, 1.0)], False),  # INC's powers of two
        ([], False),
    ],
)
def test_scales_that_bfloat16_rounded_are_pointed_out(pairs, said):
    line = rounded_to_bfloat16(found(*pairs))
    assert bool(line) == said
    if said:
        assert "all 4 dequant scales are bfloat16 numbers" in line
