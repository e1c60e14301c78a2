# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The rotary embedding of MLA's 3-D query on CPU (patches/vllm), against numpy."""

import numpy as np
import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.platforms import current_platform

SIZE, TOKENS, HEADS, BASE = 32, 7, 3, 10000.0


def rotated(x, positions, neox):
    """Each pair of each head turned by its angle, in float64."""
    frequencies = BASE ** (-np.arange(0, SIZE, 2) / SIZE)
    out = np.empty(x.shape)
    for token, position in enumerate(positions):
        for pair, frequency in enumerate(frequencies):
            first, second = (
                (pair, pair + SIZE // 2) if neox else (2 * pair, 2 * pair + 1)
            )
            turn = np.exp(1j * position * frequency)
            value = (x[token, ..., first] + 1j * x[token, ..., second]) * turn
            out[token, ..., first], out[token, ..., second] = value.real, value.imag
    return out


@pytest.mark.parametrize("neox", [False, True], ids=["interleaved", "neox"])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_three_dimensional_query(neox, heads):
    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, heads, SIZE, generator=generator)
    key = torch.randn(TOKENS, 1, SIZE, generator=generator)
    positions = torch.tensor([0, 1, 2, 5, 9, 31, 40])
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            SIZE,
            max_position=64,
            is_neox_style=neox,
            rope_parameters={"rope_type": "default", "rope_theta": BASE},
            dtype=torch.float32,
        )
        got = rope.forward_cpu(positions, query.clone(), key.clone())
    for tensor, original in zip(got, (query, key), strict=True):
        expected = rotated(original.numpy(), positions.tolist(), neox)
        np.testing.assert_allclose(tensor.numpy(), expected, atol=1e-4)
