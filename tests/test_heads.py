# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales per head go with their heads to the tensor-parallel ranks."""

import pytest

from vllm.fp8_inc.heads import local_heads

FOUR = (0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize(
    "values, local, rank, ranks, expected",
    [
        (FOUR, 4, 0, 1, FOUR),
        (FOUR, 2, 0, 2, (0.1, 0.2)),
        (FOUR, 2, 1, 2, (0.3, 0.4)),
        (FOUR, 1, 3, 4, (0.4,)),
        (FOUR[:2], 1, 0, 4, (0.1,)),
        (FOUR[:2], 1, 1, 4, (0.1,)),
        (FOUR[:2], 1, 2, 4, (0.2,)),
        (FOUR[:2], 1, 3, 4, (0.2,)),
        ((0.7,), 4, 1, 2, (0.7,)),
    ],
)
def test_a_rank_gets_the_scales_of_its_heads(values, local, rank, ranks, expected):
    assert local_heads(values, local, rank, ranks) == expected


@pytest.mark.parametrize(
    "count, local, ranks, expected",
    [
        (2, 4, 1, "4 heads"),
        (3, 1, 4, r"4 \(or a divisor of 4\) heads"),
        (8, 2, 2, "4 heads"),
        (2, 1, 1, "1 heads"),
    ],
)
def test_another_number_of_scales_is_an_error(count, local, ranks, expected):
    with pytest.raises(ValueError, match=f"holds {count} scales.*{expected}"):
        local_heads([0.1] * count, local, 0, ranks)
