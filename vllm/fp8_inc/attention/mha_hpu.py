# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MHA and GQA on HPU over an FP8 cache: what the worker's HPUAttentionImpl is given."""

from torch import nn

from vllm.fp8_inc.attention.hpu_cache import Fp8KVCache
from vllm.fp8_inc.attention.hpu_decode import PagedDecode
from vllm.fp8_inc.attention.hpu_prompt import PromptAttention
from vllm.fp8_inc.attention.mla_hpu import replace_prompt_modules
from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.scales import AttentionScales


class MHAPieces(nn.Module):
    """Caches, decode and prefill of one layer.

    Args:
        fmt: The format of the device.
        use_contiguous_pa: See Fp8KVCache.
        matmul: "fp8" or "bf16", see PagedDecode.
    """

    def __init__(
        self, fmt: Fp8Format, use_contiguous_pa: bool, matmul: str = "fp8"
    ) -> None:
        super().__init__()
        self.k_cache = Fp8KVCache(use_contiguous_pa)
        self.v_cache = Fp8KVCache(use_contiguous_pa, is_value=True)
        self.decode = PagedDecode(self.k_cache, self.v_cache, fmt, matmul)
        self.prompt = PromptAttention(fmt, matmul)

    def load_scales(self, scales: AttentionScales) -> None:
        """Takes the scales of the layer, at the start and at each reload.

        For a layer that shares the cache of another, k and v must be that layer's.
        """
        self.k_cache.scale.load(scales.k)
        self.v_cache.scale.load(scales.v)
        self.decode.load_scales(scales, scales.q)
        self.prompt.load_scales(scales, q=scales.q, k=scales.k, v=scales.v)


def install(impl: nn.Module, fmt: Fp8Format, matmul: str = "fp8") -> MHAPieces:
    """Gives the worker's HPUAttentionImpl our pieces, at the end of its construction.

    Args:
        impl: Its k_cache, v_cache, matmul_qk, matmul_av, softmax, batch2block_matmul,
            block2batch_matmul and fused_scaled_dot_product_attention are replaced.
        fmt: The format of the device.
        matmul: "fp8" or "bf16".

    Returns:
        The pieces. ``load_scales`` is due once the weights are in;
        ``decode.forward_decode`` takes the place of HPUPagedAttention's.

    Raises:
        NotImplementedError: For ALiBi and attention sinks.
    """
    for what, value in {
        "ALiBi": impl.alibi_slopes,
        "attention sinks": impl.sinks,
    }.items():
        if value is not None:
            raise NotImplementedError(
                f"--kv-cache-dtype fp8_inc on HPU does not support {what}; serve with "
                "--kv-cache-dtype auto"
            )
    pieces = MHAPieces(fmt, impl.k_cache.use_contiguous_pa, matmul)
    impl.k_cache, impl.v_cache = pieces.k_cache, pieces.v_cache
    replace_prompt_modules(impl, pieces.prompt)
    return pieces
