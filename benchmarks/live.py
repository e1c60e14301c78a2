# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""One engine for many arms: scales and device are changed while it runs.

A start costs more than an arm on a small model. What is changed is what a start sets:
``scales`` and ``format`` of each attention layer.

The model computes in float32, which is several times faster than bf16 on a CPU without
bf16 instructions, and whose own rounding does not hide what the cache does. What is
cached are the bytes of a bf16 model: cast(bf16(x) * bf16(1 / dequant_scale)).
"""

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from vllm.fp8_inc.attention.cache import MadeFor
from vllm.fp8_inc.comparison.forced import ForcedWorker
from vllm.fp8_inc.comparison.statistics import paired
from vllm.fp8_inc.formats import FORMATS, Fp8Format
from vllm.fp8_inc.scales import AttentionScales, StaticScale, give_scales

Result = dict[str, list]


class NearestEven(Fp8Format):
    """A device's format that casts float32 as if it were bf16."""

    def cast(self, values: torch.Tensor, quant_scale: torch.Tensor) -> torch.Tensor:
        return super().cast(values.bfloat16(), quant_scale)


class Truncating(Fp8Format):
    """A device's format that rounds towards zero."""

    def cast(self, values: torch.Tensor, quant_scale: torch.Tensor) -> torch.Tensor:
        scaled = values * quant_scale.to(values.dtype)
        codes = self.encode(scaled)
        too_large = self.decode(codes).abs() > scaled.float().abs()
        return codes - too_large.to(torch.uint8)


class CastWriter:
    """Writes K and V as ``HeadsWriter`` does, by the cast of a format in torch.

    Args:
        cache: [blocks, kv_heads, block_size, 2 * head_size] uint8, written.
        scales: Of the layer.
        fmt: Whose cast it is.
    """

    def __init__(
        self, cache: torch.Tensor, scales: AttentionScales, fmt: Fp8Format
    ) -> None:
        blocks, heads, size, both = cache.shape
        k, v = cache.view(blocks, heads, size * both).chunk(2, dim=-1)
        self._k = k.view(blocks, heads, both // 2, size)
        self._v = v.view(blocks, heads, size, both // 2)
        self._scales, self._format = scales, fmt

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """See ``HeadsWriter.write``."""
        token = (slots >= 0).nonzero()[:, 0]
        block, place = (
            slots[token] // self._k.shape[-1],
            slots[token] % self._k.shape[-1],
        )
        k, v = self._scales.k, self._scales.v
        cast = self._format.cast
        self._k[block, :, :, place] = cast(key[token], k.of_heads(k.quant_scale))
        self._v[block, :, place] = cast(value[token], v.of_heads(v.quant_scale))


def format_of(device: str, writer: type[Fp8Format]) -> Fp8Format:
    """The format of a device, with another cast."""
    known = FORMATS[device]
    names = ("name", "max", "has_infinity", "nan_keeps_sign")
    return writer(**{name: getattr(known, name) for name in names})


def static(values: list[float]) -> StaticScale:
    """Multipliers of a bf16 model; one, or one a head."""
    value = values[0] if len(values) == 1 else values
    return StaticScale.from_dequant(value, torch.bfloat16)


class LiveWorker(ForcedWorker):
    """A worker extension."""

    def kv_set(
        self,
        device: str,
        k: list[list[float]],
        v: list[list[float]],
        truncate: bool = False,
    ) -> None:
        """Gives each layer dequant scales, one or one a head, and a device's format.

        Args:
            truncate: Write by ``Truncating``; MHA and GQA only.
        """
        layers = [
            module
            for module in self.model_runner.model.modules()
            if hasattr(module, "kv_cache_dtype") and hasattr(module, "impl")
        ]
        for layer, of_k, of_v in zip(layers, k, v, strict=True):
            layer.impl.format = FORMATS[device]
            scales = AttentionScales(static(of_k), static(of_v), None, "benchmark")
            give_scales(layer, scales)
            # A cached property: what is left out is made again.
            vars(layer.impl).pop("_writer", None)
            if truncate:
                fmt = format_of(device, Truncating)
                layer.impl._writer = MadeFor(
                    partial(CastWriter, scales=scales, fmt=fmt)
                )


def options(quantised: bool) -> dict[str, Any]:
    """What the engine of the arms needs."""
    extension = f"{LiveWorker.__module__}.{LiveWorker.__qualname__}"
    found = {"worker_extension_cls": extension, "dtype": "float32"}
    return found | {"kv_cache_dtype": "fp8_inc" if quantised else "auto"}


def forced(llm: Any, texts: list[list[int]], work: Path, reference: bool) -> Result:
    """Teacher-forced nll, and kl and same against the reference, text by text.

    Args:
        llm: The engine, with ``options``.
        texts: Token ids.
        work: Where the reference keeps its hidden states.
        reference: Whether this is it.
    """
    from vllm import SamplingParams

    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    result: Result = {"nll": [], "kl": [], "same": []}
    llm.collective_rpc("kv_forced_start")
    for n, tokens in enumerate(texts):
        llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        path = str(work / f"{n}.safetensors")
        files = (path, None) if reference else (None, path)
        taken = llm.collective_rpc("kv_forced_take", args=(tokens, *files))
        for key, values in taken[0].items():
            result[key].append(values)
    llm.collective_rpc("kv_forced_stop")
    return result


def figures(result: Result, base: Result) -> dict[str, float]:
    """What is shown of an arm; each interval is half of 95 %, over texts."""
    import math

    kl = [fmean(text) for text in result["kl"]]
    divergence = paired(kl, [0.0] * len(kl))
    change = paired(*([fmean(text) for text in r["nll"]] for r in (result, base)))
    return {
        "perplexity": math.exp(fmean(x for text in result["nll"] for x in text)),
        "nll_difference": change.mean,
        "nll_ci95": change.half_width,
        "kl": divergence.mean,
        "kl_ci95": divergence.half_width,
        "top1": fmean(x for text in result["same"] for x in text),
    }
