# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``quant_method: auto-round`` and ``inc`` on CPU: AutoRound's own FP8 format.

AutoRound writes it for its schemes FP8_STATIC and FP8_BLOCK (export_to_fp8.py of
intel/auto-round), and vLLM has no loader for it. Integers and MX formats stay
upstream's. AutoRound's llm_compressor format is compressed-tensors.
"""

import os
from typing import Any

import torch

from vllm.fp8_inc.layers.recipe import Fp8Recipe
from vllm.fp8_inc.layers.served import ServedOnCpu
from vllm.model_executor.layers.quantization.inc import INCConfig

_FP8 = {"bits": 8, "act_bits": 8, "act_data_type": "fp", "sym": True, "fmt": "e4m3"}


class Fp8IncINCConfig(ServedOnCpu, INCConfig):
    """Upstream's configuration, and FP8 layers, which run on CPU."""

    SUPPORTED_DTYPES = INCConfig.SUPPORTED_DTYPES | {"fp"}
    SUPPORTED_FORMATS = INCConfig.SUPPORTED_FORMATS | {"auto_round:fp8_static"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            super().__init__(*args, **kwargs)

    @staticmethod
    def get_config_filenames() -> list[str]:
        # quant_config.configure_on_cpu puts the configuration of the JSON in place.
        if os.environ.get("QUANT_CONFIG"):
            return []
        return INCConfig.get_config_filenames()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8IncINCConfig":
        if "fp8_config" in config:
            raise ValueError(
                "config.json: quantization_config is one of INC itself (fp8_config "
                f"{config['fp8_config']!r}), whose FP8 weights are transposed and "
                "whose names (scale_weight, scale_input) no loader of vLLM reads. "
                'Save the model with INC\'s format="vllm"'
            )
        if config.get("data_type") == "fp":
            _check(config)
            size = config["group_size"]
            if isinstance(size, list):  # upstream needs something hashable
                config = config | {"group_size": tuple(size)}
        return super().from_config(config)

    def recipe_of(self, layer: torch.nn.Module, prefix: str) -> Fp8Recipe | None:
        if self.data_type != "fp":
            return None
        found = self.config_parser.resolve(layer, prefix)
        # Upstream looks for unquantised layers under this name too.
        outer = (self.extra_config or {}).get(f"model.{prefix}", {})
        if not found.quantized or outer.get("bits", 8) >= 16:
            return None
        size = found.group_size
        if found.bits != 8 or not found.sym or not _is_known(size):
            raise ValueError(
                f"{prefix}: bits {found.bits}, group_size {size}, sym {found.sym} of "
                "an FP8 checkpoint is not served; 8 bits with group_size 0 (per "
                "tensor), -1 (per channel) or [rows, columns], symmetric, are"
            )
        adjustment = self.adjustment()
        if isinstance(size, tuple):
            return Fp8Recipe("block", False, adjustment, size, "weight_scale_inv")
        static = not self.config.get("act_dynamic")
        return Fp8Recipe("channel" if size else "tensor", static, adjustment)


def _is_known(size: Any) -> bool:
    return size in (0, -1) or (isinstance(size, tuple) and len(size) == 2)


def _check(config: dict[str, Any]) -> None:
    """Refuses what AutoRound calls "fp" and is not W8A8 in E4M3."""
    for key, value in _FP8.items():
        if config.get(key, value) != value:
            raise ValueError(
                f"config.json: quantization_config.{key} is {config[key]!r}; with "
                f"data_type 'fp' {value!r} is served. Quantise the model to FP8_STATIC "
                "or FP8_BLOCK"
            )
