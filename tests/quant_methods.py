# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""FP8 checkpoints as each producer writes them: one row a format.

A row turns plain tensors (names and shapes of compressed-tensors) into the
producer's, and says so in config.json as the producer does. In every format the MLP of
the first layer is left unquantised, through the producer's own list of exceptions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import (
    deepseek_config,
    kv_scales,
    llama_config,
    quantization_config,
    quantize,
    quantize_blocks,
    weights,
    write,
)

Tensors = dict[str, torch.Tensor]
# No fused projection, nor an expert, fills its last block.
SIZES = {
    ("MLA", "block"): {
        "hidden_size": 192,
        "intermediate_size": 320,
        "moe_intermediate_size": 160,
        "kv_lora_rank": 128,
    },
    ("MHA", "block"): {"hidden_size": 192, "intermediate_size": 320},
}
BUILDERS = {"MHA": llama_config, "MLA": deepseek_config}
EXCEPTION = "model.layers.0.mlp"
EXCEPTIONS = [f"{EXCEPTION}.{part}_proj" for part in ("gate", "up", "down")]
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


@dataclass(frozen=True)
class Format:
    """One producer's format.

    Attributes:
        name: ``quant_method``, and which of its schemes.
        weights: "tensor", "channel" or "block".
        static: Whether there is an input_scale.
        declare: What to write into quantization_config, given the plain names of the
            quantised projections.
        shape: Turns a plain weight scale into the producer's shape and dtype.
        kv_names: Plain name of a KV scale -> the producer's, for MHA and MLA.
        file: Where quantization_config stands.
        slow: Whether MHA is left to the nightly run.
    """

    name: str
    weights: str
    static: bool
    declare: Callable[[list[str]], dict[str, Any]]
    shape: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale
    kv_names: Callable[[str, str], str | None] = lambda name, kind: name
    file: str = "config.json"
    slow: bool = False

    @property
    def scale_name(self) -> str:
        """What the producer calls a weight scale."""
        inv = self.weights == "block" and not self.name.startswith("modelopt")
        return "weight_scale_inv" if inv else "weight_scale"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, and the same numbers under plain names for the oracle."""

    served: str
    plain: str
    tensors: Tensors
    quantized: set[str]


def plain_tensors(config: dict[str, Any], row: Format) -> Tensors:
    """FP8 weights and their scales; the exceptions as they were."""
    tensors = weights(config)
    if row.weights == "block":
        quantized = quantize_blocks(tensors)
    else:
        quantized = quantize(
            tensors, per_channel=row.weights == "channel", static=row.static
        )
    kept = {n: t for n, t in quantized.items() if not n.startswith(EXCEPTION)}
    return kept | {n: t for n, t in tensors.items() if n.startswith(EXCEPTION)}


def build(folder: Path, row: Format, kind: str) -> Checkpoint:
    """Writes a checkpoint of ``kind`` in the format of ``row``, and its plain twin."""
    config = BUILDERS[kind](**SIZES.get((kind, row.weights), {}))
    plain = plain_tensors(config, row)
    named = {
        n.replace("weight_scale_inv", row.scale_name): (
            row.shape(t) if ".weight_scale" in n else t
        )
        for n, t in plain.items()
    }
    for name, scale in kv_scales(config).items():
        if renamed := row.kv_names(name, kind):
            named[renamed] = scale.reshape(())
    quantized = {
        n.removesuffix(".weight") for n, t in plain.items() if t.dtype.itemsize == 1
    }
    declared = row.declare(sorted(quantized))
    served = folder / "served"
    if row.file == "config.json":
        write(served, config | {"quantization_config": declared}, named)
    else:
        write(served, config, named)
        (served / row.file).write_text(json.dumps(declared))
    return Checkpoint(
        str(served), write(folder / "plain", config, plain), plain, quantized
    )


def modelopt(algorithm: str) -> Callable[[list[str]], dict[str, Any]]:
    """config.json of ModelOpt 0.31 and newer."""
    return lambda names: {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}
        | {"strategy": "tensor"},
        "ignore": ["lm_head", f"{EXCEPTION}*"],
        "producer": {"name": "modelopt", "version": "0.43.0"},
    }


def hf_quant_config(names: list[str]) -> dict[str, Any]:
    """hf_quant_config.json of older ones."""
    return {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", f"{EXCEPTION}*"],
        },
    }


def modelopt_mixed(names: list[str]) -> dict[str, Any]:
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN"
    return {
        "quant_method": "modelopt_mixed",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "quantized_layers": {name: {"quant_algo": algorithm} for name in names},
        "ignore": ["lm_head"],
    }


def modelopt_kv(name: str, kind: str) -> str | None:
    layer, role = name.removesuffix("_scale").rsplit(".", 1)
    return None if role == "q" else f"{layer}.{role}_proj.{role}_scale"


def quark_spec(qscheme: str, dynamic: bool, **more: Any) -> dict[str, Any]:
    return {
        "dtype": "fp8_e4m3",
        "qscheme": qscheme,
        "is_dynamic": dynamic,
        "symmetric": True,
    } | more


def quark(scheme: dict[str, Any], key: str = "global_quant_config", **more: Any):
    """The scheme of all layers under ``key``, and the KV cache's."""
    layer = {"output_tensors": None, "bias": None, "target_device": None} | scheme
    cache = layer | {"output_tensors": quark_spec("per_tensor", False)}
    unquantised = dict.fromkeys(layer)

    def declare(names: list[str]) -> dict[str, Any]:
        patterns = ["*k_proj", "*v_proj", "*kv_b_proj"]
        return {
            "quant_method": "quark",
            "global_quant_config": unquantised,
            "layer_quant_config": {pattern: dict(cache) for pattern in patterns},
            "layer_type_quant_config": {},
            "exclude": ["lm_head", *EXCEPTIONS],
            "export": {"kv_cache_group": patterns, "pack_method": "reorder"},
        } | {key: {"Linear": layer} if "type" in key else layer}

    return declare


def quark_kv(name: str, kind: str) -> str | None:
    layer, role = name.removesuffix("_scale").rsplit(".", 1)
    if kind == "MLA":
        return f"{layer}.kv_b_proj.output_scale" if role == "v" else None
    return f"{layer}.{role}_proj.output_scale"


def auto_round(quant_method: str, size: Any, static: bool = True):
    """AutoRound's schemes FP8_STATIC and FP8_BLOCK in its own format."""
    return lambda names: {
        "quant_method": quant_method,
        "packing_format": "auto_round:fp8_static",
        "bits": 8,
        "group_size": size,
        "sym": True,
        "data_type": "fp",
        "act_bits": 8,
        "act_data_type": "fp",
        "act_dynamic": not static,
        "activation_scheme": "static" if static else "dynamic",
        "fmt": "e4m3",
        "block_name_to_quantize": "model.layers",
        "extra_config": {name: {"bits": 16} for name in EXCEPTIONS},
    }


def auto_round_compressed(names: list[str]) -> dict[str, Any]:
    """AutoRound's llm_compressor format."""
    scheme = {
        "targets": ["Linear"],
        "weights": FP8 | {"strategy": "channel"},
        "input_activations": FP8 | {"strategy": "tensor"},
    }
    return quantization_config(
        config_groups={"group_0": scheme},
        ignore=["lm_head", "re:.*mlp.gate$", *EXCEPTIONS],
        provider="auto-round",
    )


def flat(scale: torch.Tensor) -> torch.Tensor:
    return scale.flatten()


def scalar(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(())


STATIC = {
    "weight": quark_spec("per_tensor", False),
    "input_tensors": quark_spec("per_tensor", False),
}
CHANNEL = {
    "weight": quark_spec("per_channel", False, ch_axis=0),
    "input_tensors": quark_spec("per_channel", True, ch_axis=1),
}
BLOCK = {
    "weight": quark_spec("per_block", False, block_size=[128, 128]),
    "input_tensors": quark_spec("per_group", True, group_size=128),
}
FORMATS = [
    Format("modelopt FP8", "tensor", True, modelopt("FP8"), scalar, modelopt_kv),
    Format(
        "modelopt FP8 in hf_quant_config.json",
        "tensor",
        True,
        hf_quant_config,
        scalar,
        modelopt_kv,
        file="hf_quant_config.json",
        slow=True,
    ),
    Format(
        "modelopt FP8_PER_CHANNEL_PER_TOKEN",
        "channel",
        False,
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        flat,
        modelopt_kv,
        slow=True,
    ),
    Format(
        "modelopt FP8_PB_WO",
        "block",
        False,
        modelopt("FP8_PB_WO"),
        lambda scale: scale[:, None, :, None],
        modelopt_kv,
        slow=True,
    ),
    Format("modelopt_mixed", "channel", False, modelopt_mixed, flat, modelopt_kv),
    Format("quark per tensor", "tensor", True, quark(STATIC), scalar, quark_kv),
    Format(
        "quark per channel, by layer type",
        "channel",
        False,
        quark(CHANNEL, "layer_type_quant_config"),
        flat,
        quark_kv,
        slow=True,
    ),
    Format("quark blocks", "block", False, quark(BLOCK), kv_names=quark_kv, slow=True),
    Format(
        "auto-round FP8_STATIC", "channel", True, auto_round("auto-round", -1), flat
    ),
    Format(
        "auto-round FP8_BLOCK",
        "block",
        False,
        auto_round("auto-round", [128, 128], static=False),
        slow=True,
    ),
    Format("inc, AutoRound's FP8 per tensor", "tensor", True, auto_round("inc", 0)),
    Format("auto-round to llm_compressor", "channel", True, auto_round_compressed),
]
