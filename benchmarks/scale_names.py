# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""How fast the names of a DeepSeek-R1-sized checkpoint are resolved.

``python -m benchmarks.scale_names``
"""

import statistics
import time
from collections.abc import Callable

LAYERS, DENSE_LAYERS, EXPERTS = 61, 3, 256
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def checkpoint_names() -> list[str]:
    """Names of all tensors: FP8 weights with a scale each, and k, v and q scales."""
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        linear = [f"{layer}.self_attn.{name}" for name in ATTENTION]
        if n < DENSE_LAYERS:
            linear += [f"{layer}.mlp.{name}" for name in MLP]
        else:
            linear += [f"{layer}.mlp.shared_experts.{name}" for name in MLP]
            linear += [
                f"{layer}.mlp.experts.{expert}.{name}"
                for expert in range(EXPERTS)
                for name in MLP
            ]
            names.append(f"{layer}.mlp.gate.weight")
        for name in linear:
            names += [f"{name}.weight", f"{name}.weight_scale"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            names.append(f"{layer}.{norm}.weight")
        names += [f"{layer}.self_attn.{role}_scale" for role in "kvq"]
    return names


def seconds(function: Callable[[str], object], names: list[str]) -> float:
    """Wall time of ``function`` on every name, on one core."""
    start = time.perf_counter()
    for name in names:
        function(name)
    return time.perf_counter() - start


def compare(repeats: int = 7) -> tuple[float, float]:
    """Medians in seconds of matching and of one ``endswith`` for each name.

    The two alternate, so that a slow phase of the machine meets both.
    """
    from vllm.fp8_inc.sources.checkpoint import match_scale_key

    def trivial(name: str) -> bool:
        return name.endswith("_scale")

    names = checkpoint_names()
    pairs = [
        (seconds(match_scale_key, names), seconds(trivial, names))
        for _ in range(repeats)
    ]
    matching, passing = zip(*pairs)
    return statistics.median(matching), statistics.median(passing)


def main() -> None:
    """Prints the total, the rate, and the ratio to a trivial pass."""
    count = len(checkpoint_names())
    matching, passing = compare()
    print(
        f"{count} names in {matching:.3f} s ({count / matching / 1e6:.2f} million "
        f"names/s), {matching / passing:.1f} times one endswith a name"
    )


if __name__ == "__main__":
    main()
