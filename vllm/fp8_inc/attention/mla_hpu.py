# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MLA on HPU over an FP8 latent cache: what the worker's HPUMLAImpl is given."""

import torch
from torch import nn

from vllm.fp8_inc.attention.hpu_cache import Fp8KVCache
from vllm.fp8_inc.attention.hpu_decode import PagedDecode
from vllm.fp8_inc.attention.hpu_prompt import PromptAttention
from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import AttentionScales


class PlainMatmul(nn.Module):
    """A bfloat16 product, for the prefill without a fused kernel."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.matmul(x, y, **kwargs)


class PlainSoftmax(nn.Module):
    """A softmax in the dtype of its input, for the same prefill."""

    def forward(
        self, x: torch.Tensor, dim: int = -1, inv_head: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.softmax(x, dim)


class MLAPieces(nn.Module):
    """Cache, decode and prefill of one MLA layer.

    Args:
        fmt: The format of the device.
        use_contiguous_pa: See Fp8KVCache.
        matmul: "fp8" or "bf16", see PagedDecode.
    """

    def __init__(
        self, fmt: Fp8Format, use_contiguous_pa: bool, matmul: str = "fp8"
    ) -> None:
        super().__init__()
        self.latent_cache = Fp8KVCache(use_contiguous_pa)
        self.decode = PagedDecode(self.latent_cache, None, fmt, matmul)
        self.prompt = PromptAttention(fmt, matmul)

    def load_scales(self, scales: AttentionScales) -> None:
        """Takes the scales of the layer, at the start and at each reload.

        The prefill's q has its own (``q``), the absorbed q of the decode another
        (``q_latent``): they live in different spaces. The expanded K and V of the
        prefill have none, since k and v are the latent's: they are measured.
        """
        self.latent_cache.scale.load(scales.k)
        self.decode.load_scales(scales, scales.q_latent)
        self.prompt.load_scales(scales, q=scales.q, k=None, v=None)


def install(impl: nn.Module, fmt: Fp8Format, matmul: str = "fp8") -> MLAPieces:
    """Gives the worker's HPUMLAImpl our pieces, at the end of its construction.

    Args:
        impl: Its latent_cache_k, matmul_qk, matmul_av, softmax, batch2block_matmul,
            block2batch_matmul and fused_scaled_dot_product_attention are replaced.
        fmt: The format of the device.
        matmul: "fp8" or "bf16".

    Returns:
        The pieces. ``load_scales`` is due once the weights are in;
        ``decode.forward_decode`` takes the place of HPUPagedAttention's.
    """
    pieces = MLAPieces(fmt, impl.latent_cache_k.use_contiguous_pa, matmul)
    impl.latent_cache_k = pieces.latent_cache
    replace_prompt_modules(impl, pieces.prompt)
    return pieces


def replace_prompt_modules(impl: nn.Module, prompt: PromptAttention) -> None:
    """Replaces the modules of the worker's prefill: fused, and matrix by matrix."""
    if impl.fused_scaled_dot_product_attention is not None:
        impl.fused_scaled_dot_product_attention = prompt
    for name in ("matmul_qk", "matmul_av", "batch2block_matmul", "block2batch_matmul"):
        setattr(impl, name, PlainMatmul())
    impl.softmax = PlainSoftmax()
