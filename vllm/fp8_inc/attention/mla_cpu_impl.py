# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""MLA on CPU over a bf16 or an FP8 latent cache.

Every query attends to what the cache holds, new tokens included: but for rounding,
results do not depend on chunk boundaries or on prefix-cache hits. (Upstream's and the
HPU worker's prefill reads new tokens before they are quantised.)

Prefill expands K and V with kv_b_proj; decode attends to the latent itself, with
kv_b_proj absorbed into the query and the output, and so do a few new tokens over a
cached context, to which expanding all of it would cost more.
"""

from functools import cached_property

import torch

from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.fp8_inc.attention.absorption import (
    as_seen,
    break_even,
    is_exact,
    quantizes_inputs,
)
from vllm.fp8_inc.attention.cache import MadeFor, decode_from_cache, storage
from vllm.fp8_inc.attention.dense import Joined
from vllm.fp8_inc.attention.kernels.absorb import from_latent, to_latent
from vllm.fp8_inc.attention.kernels.mla import decode_latents
from vllm.fp8_inc.attention.kernels.mla import load as load_kernels
from vllm.fp8_inc.attention.kernels.writers import LatentWriter
from vllm.fp8_inc.layers.linear import PlainLinearMethod
from vllm.fp8_inc.scales import AttentionScales, StaticScale
from vllm.fp8_inc.settings import Settings
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBaseImpl,
    MLACommonMetadata,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.attention.backend import AttentionLayer

# Tokens of a cached context that are expanded to K and V at once.
_CONTEXT_PART = 2048


class CPUMLAImpl(MLACommonBaseImpl[MLACommonMetadata]):
    """Writes and reads the latent cache [blocks, block_size, latent + rope]."""

    can_return_lse_for_decode: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        unsupported = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a logits soft cap": logits_soft_cap,
            "KV sharing": kv_sharing_target_layer_name,
            "an indexer": indexer,
        }
        for what, value in unsupported.items():
            if value is not None:
                raise NotImplementedError(f"MLA on CPU does not support {what}")
        for name, size in (("latent", kv_lora_rank), ("rope", qk_rope_head_dim)):
            if size % 16:
                raise NotImplementedError(
                    f"MLA on CPU needs a {name} size that is a multiple of 16, "
                    f"not {size}"
                )
        load_kernels()
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            kv_cache_dtype,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            qk_head_dim,
            v_head_dim,
            kv_b_proj,
        )
        self._break_even = break_even(kv_lora_rank, qk_nope_head_dim, v_head_dim)
        self.q_lora_rank = q_lora_rank
        self.q_pad_num_heads = q_pad_num_heads
        self.supports_quant_query_input = False
        # What the parent and the layer read of context parallelism.
        self.dcp_world_size = 1
        self.cp_kv_cache_interleave_size = 1
        self.format = Settings.of(get_current_vllm_config()).format
        self.scales: AttentionScales | None = None
        if type(kv_b_proj.quant_method) is UnquantizedLinearMethod:
            kv_b_proj.quant_method = PlainLinearMethod()

    @property
    def _scale(self) -> StaticScale | None:
        """The scale of the latent; None for an unquantised cache."""
        return self.scales.k if self.scales is not None else None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Writes one latent row per token.

        Args:
            kv_c_normed: [tokens, latent].
            k_pe: [tokens, 1, rope], after RoPE.
            kv_cache: [blocks, block_size, latent + rope].
            slot_mapping: [tokens], -1 for padding.
            kv_cache_dtype: Ignored: known since construction.
            k_scale: Ignored: vLLM's placeholder; ours are in ``scales``.
        """
        if kv_cache.numel() == 0:
            return
        writer = self._writer(kv_cache, self.scales)
        writer.write(kv_c_normed, k_pe.squeeze(1), slot_mapping)

    @cached_property
    def _writer(self) -> MadeFor[LatentWriter]:
        return MadeFor(self._make_writer)

    def _make_writer(self, cache: torch.Tensor) -> LatentWriter:
        scale = 1.0 if self._scale is None else self._scale.quant_scale.item()
        return LatentWriter(cache, self.kv_lora_rank, scale, self.format)

    def _read(
        self, kv_cache: torch.Tensor, block_table: torch.Tensor, tokens: range
    ) -> torch.Tensor:
        """Returns the latents of some tokens of a sequence, float32."""
        size = kv_cache.shape[1]
        first = tokens.start // size
        blocks = block_table[first : -(-tokens.stop // size)].long()
        stored = storage(kv_cache)[blocks].flatten(0, 1)
        stored = stored[tokens.start - first * size :][: len(tokens)]
        return decode_from_cache(stored, self._scale, self.format)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attends with all tokens of a batch, those that are decoded first.

        Args:
            q: [tokens, heads, nope + rope].
            kv_c_normed: Ignored: read from the cache, which holds it already.
            k_pe: Ignored, as kv_c_normed.
            kv_c_and_k_pe_cache: [blocks, block_size, latent + rope].
            attn_metadata: Of this batch.
            k_scale: Ignored, see do_kv_cache_update.
            output: [tokens, heads * v_head_dim], written.
            output_scale: Must be None: no quantised output on CPU.
        """
        assert output_scale is None
        cache, decoded = kv_c_and_k_pe_cache, attn_metadata.decoded
        if decoded:
            query = self._absorb(q[:decoded])
            latent, _ = self.forward_mqa(query, cache, attn_metadata, self._layer)
            output[:decoded] = from_latent(latent, self._layer.W_UV).flatten(1)
        prefill = attn_metadata.prefill
        if prefill is None:
            return
        q, output = q[decoded:], output[decoded:]
        starts = prefill.query_start_loc.tolist()
        requests = len(starts) - 1
        chunked = prefill.chunked_context
        contexts = chunked.context_lens_list if chunked else [0] * requests
        for request, context in enumerate(contexts):
            rows = slice(starts[request], starts[request + 1])
            tokens, table = rows.stop - rows.start, prefill.block_table[request]
            few = context and tokens < self._break_even and is_exact(self.kv_b_proj)
            attend = self._absorbed if few else self._expanded
            result = attend(q[rows], cache, table, context)
            output[rows] = result.flatten(1).to(output.dtype)

    def _expanded(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        table: torch.Tensor,
        context: int,
    ) -> torch.Tensor:
        """Attends with the last tokens of a request to K and V of all of it."""
        attention = Joined(q, self.scale, self.v_head_dim)
        parts = [
            range(start, min(start + _CONTEXT_PART, context))
            for start in range(0, context, _CONTEXT_PART)
        ]
        for tokens in [*parts, range(context, context + len(q))]:
            key, value = self._expand(self._read(cache, table, tokens).to(q.dtype))
            attention.attend(key, value, causal=tokens.start == context)
        return attention.result()

    def _absorbed(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        table: torch.Tensor,
        context: int,
    ) -> torch.Tensor:
        """As _expanded, in latent space: each token is decoded as a request of its own.

        kv_b_proj sees the latents as it would while expanding: where it quantises its
        activations, they are quantised. All else is float32.
        """
        stop = context + len(q)
        lengths = torch.arange(context + 1, stop + 1, dtype=torch.int32)
        scale = self._scale
        if quantizes_inputs(self.kv_b_proj):
            latent = self._read(cache, table, range(stop))
            kv_c = latent[:, : self.kv_lora_rank]
            kv_c.copy_(as_seen(self.kv_b_proj, kv_c.to(q.dtype), self.format))
            cache, table, scale = latent[None], torch.zeros(1, dtype=torch.int32), None
        query, tables = self._absorb(q.float()), table.repeat(len(q), 1)
        latent = self._decode(query, cache, tables, lengths, scale)
        return from_latent(latent, self._layer.W_UV)

    @cached_property
    def _layer(self) -> torch.nn.Module:
        """Has W_UK_T [heads, nope, latent] and W_UV [heads, latent, value]."""
        layers = get_forward_context().no_compile_layers.values()
        return next(layer for layer in layers if getattr(layer, "impl", None) is self)

    def _absorb(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent and the rope part of queries [tokens, heads, nope + rope]."""
        nope, rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return to_latent(nope, self._layer.W_UK_T), rope

    def _expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expands [tokens, latent + rope] to K and V of every head."""
        kv_c, k_pe = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(kv_c.contiguous())[0].view(
            -1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        )
        k_nope, value = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_pe = k_pe[:, None].expand(-1, self.num_heads, -1)
        return torch.cat([k_nope, k_pe], dim=-1), value

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, None]:
        """Decodes: one query a request attends to the latent.

        Args:
            q: [requests, heads, latent + rope], or its two parts.
            kv_c_and_k_pe_cache: [blocks, block_size, latent + rope].
            attn_metadata: Of this batch.
            layer: Unused.

        Returns:
            [requests, heads, latent] in the dtype of q, and no logsumexp.
        """
        decode = attn_metadata.decode
        assert decode is not None
        if not isinstance(q, tuple):
            q = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        table, lengths = decode.block_table, decode.seq_lens
        out = self._decode(q, kv_c_and_k_pe_cache, table, lengths, self._scale)
        return out, None

    def _decode(
        self,
        q: tuple[torch.Tensor, torch.Tensor],
        cache: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        scale: StaticScale | None,
    ) -> torch.Tensor:
        """Decodes; ``scale`` is None for a cache without codes."""
        dequant_scale = 1.0 if scale is None else scale.dequant_scale.item()
        return decode_latents(
            *q, storage(cache), table, lengths, self.scale, dequant_scale, self.format
        )
