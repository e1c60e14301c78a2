# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""One process without a parallel group, and weights by compressed-tensors itself."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """vLLM's parameters ask for their rank; here there is only one."""
    from vllm.model_executor import parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.fixture
def fp8_weight():
    """Quantises a random [out, in] weight as a producer does."""

    def build(
        rows: int, columns: int, strategy: str, maximum: float, size: float, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns FP8 codes and scales, [1] or [out, 1]; amax is about 3 * size."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, columns, generator=generator) * size
        amax = weight.abs().amax(1, keepdim=True) if strategy == "channel" else None
        amax = weight.abs().amax().view(1) if amax is None else amax
        args = QuantizationArgs(num_bits=8, type="float", strategy=strategy)
        codes = quantize(
            weight,
            amax / maximum,
            torch.zeros_like(amax),
            args,
            dtype=torch.float8_e4m3fn,
        )
        return codes, amax / maximum

    return build
