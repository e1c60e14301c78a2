# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Upper bounds on the decode speed of DeepSeek models on Gaudi: computed, not measured.

The time of a step is at least the largest of: bytes (weights that are touched, and the
cache) over the memory's bandwidth; products over the peak of the matrix engine; on
Gaudi3 also the elements that are cast over the peak of the vector engine. Nothing is
charged for q, logits, communication, launches, or MoE imbalance; FP8 weights. Tensor
parallelism reads the whole latent cache on every device, with its share of the heads.
"""

from typing import NamedTuple


class Device(NamedTuple):
    """A Gaudi, on paper; FLOP/s and bytes/s.

    Attributes:
        vector: Of the vector engine; None: not known here, and not charged.
    """

    memory: float
    bandwidth: float
    fp8: float
    bf16: float
    vector: float | None


class Model(NamedTuple):
    """What a decode step touches.

    Attributes:
        devices: Over which weights and heads are spread.
        dense: Parameters that every token uses, of all layers.
        expert: Parameters of one expert of one layer.
        moe_layers: Layers with experts.
        experts: Routed experts of a layer.
        active: Routed experts of a token.
        layers: Attention layers.
        heads: Query heads.
    """

    devices: int
    dense: float
    expert: float
    moe_layers: int
    experts: int
    active: int
    layers: int
    heads: int


class Path(NamedTuple):
    """How attention reads the cache.

    Attributes:
        stored: Bytes that a token occupies in a layer.
        moved: Bytes that a step moves for it.
        cast: Elements that the vector engine casts for it.
        fp8: Whether the matrix engine multiplies FP8.
    """

    stored: int
    moved: float
    cast: int
    fp8: bool


DEVICES = {
    "Gaudi2": Device(96e9, 2.45e12, 865e12, 432e12, None),
    "Gaudi3": Device(128e9, 3.7e12, 1835e12, 1835e12, 28.7e12),
}
MODELS = {
    "DeepSeek-R1": Model(8, 17.1e9, 3 * 7168 * 2048, 58, 256, 8, 61, 128),
    "DeepSeek-V2-Lite": Model(1, 1.3e9, 3 * 2048 * 1408, 26, 64, 6, 27, 16),
}
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (1, 8, 32, 128)  # thousands of tokens
_LATENT, _ROPE = 512, 64


def paths(sizes: dict[str, float]) -> dict[str, Path]:
    """The ways that are compared.

    Args:
        sizes: Counted bytes, by the names of benchmarks/hpu_bytes.py.
    """
    width = _LATENT + _ROPE
    bf16, fork = "worker, bf16 cache", "this fork"
    return {
        "bf16, gathered": Path(2 * width, sizes[f"{bf16}, gathered"], 0, False),
        "bf16, contiguous": Path(2 * width, sizes[f"{bf16}, contiguous"], 0, False),
        # Dequantised; K and V quantised again.
        "worker fp8_inc, gathered": Path(
            width, sizes["worker, fp8_inc, gathered"], 2 * width + _LATENT, True
        ),
        "fork, gathered": Path(width, sizes[f"{fork}, gathered"], 0, True),
        "fork, contiguous": Path(width, sizes[f"{fork}, contiguous"], 0, True),
        "fork, bf16 matmul, gathered": Path(
            width, sizes[f'{fork}, hpu_matmul "bf16", gathered'], width, False
        ),
    }


def tokens_per_second(
    device: Device, model: Model, path: Path, batch: int, context: int
) -> float | None:
    """The bound for all sequences together; None where memory does not suffice."""
    experts = model.expert * model.moe_layers
    weights = model.dense + experts * model.experts
    cached = batch * context * model.layers
    held = weights / model.devices + cached * path.stored
    if held > device.memory:
        return None
    untouched = (1 - model.active / model.experts) ** batch
    touched = model.dense + experts * model.experts * (1 - untouched)
    read = touched / model.devices + cached * path.moved
    linear = 2 * (model.dense + experts * model.active) * batch / model.devices
    heads = model.heads / model.devices
    attention = 2 * heads * (2 * _LATENT + _ROPE) * cached
    seconds = [
        read / device.bandwidth,
        linear / device.fp8 + attention / (device.fp8 if path.fp8 else device.bf16),
    ]
    if device.vector:
        seconds.append(cached * path.cast / device.vector)
    return batch / max(seconds)


def print_tables(sizes: dict[str, float]) -> None:
    """Prints a table for each model and device.

    Args:
        sizes: As ``paths`` takes them.
    """
    ways = paths(sizes)
    for model_name, model in MODELS.items():
        for device_name, device in DEVICES.items():
            print(
                f"\n{model_name} on {model.devices} x {device_name}: bound on decode "
                "tokens/s, computed (-: does not fit)"
            )
            print("| context | batch | " + " | ".join(ways) + " |")
            print("|---" * (2 + len(ways)) + "|")
            for context in CONTEXTS:
                for batch in BATCHES:
                    bounds = [
                        tokens_per_second(device, model, way, batch, context * 1024)
                        for way in ways.values()
                    ]
                    cells = ["-" if b is None else f"{b:,.0f}" for b in bounds]
                    print(f"| {context}k | {batch} | " + " | ".join(cells) + " |")
