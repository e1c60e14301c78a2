# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Matches the scales of a checkpoint to the attention layers of a model."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.fp8_inc import hpu_worker
from vllm.fp8_inc.adjustment import FLAVOR_KEY, Adjustment, resolve_adjustment
from vllm.fp8_inc.scales import AttentionScales, StaticScale, give_scales
from vllm.fp8_inc.settings import Settings
from vllm.fp8_inc.sources.checkpoint import (
    declared_scheme,
    file_of,
    key_in_layer,
    layer_index,
    layer_of,
    match_scale_key,
    producers_of,
)
from vllm.fp8_inc.sources.hints import implausible
from vllm.fp8_inc.sources.legacy_json import LegacyScales, read_legacy_scales
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.shards import unlisted_scales
from vllm.fp8_inc.sources.store import FoundScale, ScaleStore
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

_UNIT_SCALES = "unit scales"


class ScaleLoader:
    """Collects the scales of one model and hands them to its attention layers."""

    def __init__(
        self,
        layers: dict[str, nn.Module],
        vllm_config: "VllmConfig",
        model_config: "ModelConfig",
    ) -> None:
        self.dtype = model_config.dtype
        self.model = model_config.model
        text_config = model_config.hf_text_config
        self.num_layers = text_config.num_hidden_layers
        # Layers of a draft model, which a checkpoint holds after the model's own.
        self.num_draft_layers = getattr(text_config, "num_nextn_predict_layers", 0) or 0
        self.settings = Settings.of(vllm_config)
        self.quantization = _quantization_config(model_config)
        self.declared = declared_scheme(self.quantization)
        self.legacy = _legacy_scales(self.settings, model_config)
        # The JSON has its own flavour, whatever the weights were made for.
        self.adjustment: Adjustment = resolve_adjustment(
            {FLAVOR_KEY: self.legacy.dtype} if self.legacy else self.quantization,
            self.settings.format,
        )
        self.layers: dict[str, nn.Module] = {}
        for name, module in layers.items():
            layer = layer_of(name)
            if layer is None or layer in self.layers:
                raise ValueError(
                    f"--kv-cache-dtype fp8_inc: attention layer {name} cannot be "
                    "matched to the names of a checkpoint; serve this model with "
                    "--kv-cache-dtype auto"
                )
            self.layers[layer] = module
        self.store = ScaleStore(self.model)
        self.is_loaded = False

    def set_unit_scales(self) -> None:
        """Sets dequant_scale 1.0 on every layer."""
        unit = StaticScale.from_dequant(1.0, self.dtype)
        for module in self.layers.values():
            give_scales(module, AttentionScales(unit, unit, None, _UNIT_SCALES))

    def keep_back(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes weights through and keeps the scales.

        Raises:
            ValueError: For a scale that is not a positive finite number.
        """
        self.store.clear()
        replaced = 0
        for key, tensor in weights:
            if self.legacy and match_scale_key(key):
                replaced += 1
            elif not self.store.take(key, tensor):
                yield key, tensor
        if self.legacy:
            self._use_legacy(self.legacy, replaced)

    def finish(self) -> None:
        """Hands out the scales and reports them in one line.

        Raises:
            ValueError: If scales are missing that the checkpoint declares, or
                present for a layer that the model does not have.
        """
        if self.is_loaded and not self.store.found:
            # Somebody updates some weights of a running model.
            logger.info("fp8_inc: no KV scales among the new weights; all stay")
            return
        self._check_all_taken()
        missing = [layer for layer in self.layers if not self._is_complete(layer)]
        if not self.legacy and self.settings.missing_scales == "error":
            self._check_shards()
        if missing and (self.declared or self.store.found):
            self._refuse_or_warn(missing)
        self.set_unit_scales()
        loaded = [layer for layer in self.layers if layer not in missing]
        for layer in loaded:
            module = self.layers[layer]
            give_scales(module, self._scales_of(layer, module))
        self.store.report_ignored()
        self._report(loaded)
        self.is_loaded = True

    def _use_legacy(self, legacy: LegacyScales, replaced: int) -> None:
        for n, value in legacy.dequant_scales.items():
            scale = FoundScale(f"kv_cache.scaling_factor.*.{n}", value)
            self.store.found[f"layers.{n}"] = {"k": scale, "v": scale}
        if replaced:
            logger.info(
                "fp8_inc: legacy_scales replaces %d scales of the checkpoint", replaced
            )

    def _file_of(self, key: str) -> str:
        return self.legacy.path if self.legacy else file_of(key, self.model)

    def _is_complete(self, layer: str) -> bool:
        return {"k", "v"} <= self.store.found.get(layer, {}).keys()

    def _check_all_taken(self) -> None:
        for layer, roles in self.store.found.items():
            if layer not in self.layers and not self._is_elsewhere(layer):
                key = next(iter(roles.values())).key
                raise ValueError(
                    f"{self._file_of(key)}: {key} belongs to no attention "
                    f"layer of the model, which has {sorted(self.layers)}"
                )

    def _is_elsewhere(self, layer: str) -> bool:
        """Whether another rank or model, or an unquantised layer, is meant."""
        return layer_index(layer) < self.num_layers + self.num_draft_layers

    def _check_shards(self) -> None:
        for path, key, scale in unlisted_scales(self.model):
            found = self.store.found.get(scale.layer, {})
            if scale.layer in self.layers and not found.keys() >= set(scale.roles):
                raise ValueError(
                    f"{path} holds {key}, which {scale.layer} lacks, but "
                    "model.safetensors.index.json does not name this file, so it is "
                    "not loaded. Add its keys to weight_map, or remove the file"
                )

    def _refuse_or_warn(self, missing: list[str]) -> None:
        if self.settings.missing_scales == "error":
            others = len(missing) - 1
            also = f" (and those of {others} more layers)" if others else ""
            raise ValueError(
                f"{self.legacy.path if self.legacy else self.model}: "
                f"{self._missing_keys(missing[0])} missing{also}, but "
                "quantization_config of config.json declares static KV scales "
                "(kv_cache_scheme or the like), or other layers have theirs. "
                "Add them (is their shard named in model.safetensors.index.json?), "
                'or set --additional-config \'{"fp8_inc": {"missing_scales": '
                '"unit"}}\' to use dequant_scale 1.0'
            )
        logger.warning(
            "fp8_inc: missing_scales=unit: dequant_scale 1.0 for %d layers that "
            "lack scales (%s)",
            len(missing),
            ", ".join(missing),
        )

    def _missing_keys(self, layer: str) -> str:
        """The names that ``layer`` lacks, as other layers have them."""
        if self.legacy:
            return f"kv_cache.scaling_factor.*.{layer_index(layer)}"
        roles: list[Role] = ["k", "v"]
        keys = []
        for role in roles:
            if role in self.store.found.get(layer, {}):
                continue
            others = (found.get(role) for found in self.store.found.values())
            known = next((scale.key for scale in others if scale), None)
            default = f"{layer}.self_attn.{role}_scale"
            keys.append(key_in_layer(known, layer) if known else default)
        return ", ".join(dict.fromkeys(keys))  # a fused scale is there once

    def _scales_of(self, layer: str, module: nn.Module) -> AttentionScales:
        found = self.store.found[layer]
        values = {role: scale.dequant_scale for role, scale in found.items()}
        if hasattr(module, "kv_lora_rank"):
            # One latent serves K and V: the larger covers both.
            values["k"] = values["v"] = max(values["k"], values["v"])
        factor = self.adjustment.factor
        try:
            static = {
                role: StaticScale.from_dequant(value * factor, self.dtype)
                for role, value in values.items()
            }
        except ValueError as error:
            key = found["k"].key
            raise ValueError(f"{self._file_of(key)}: {key}: {error}") from None
        return AttentionScales(
            static["k"],
            static["v"],
            static.get("q"),
            self._source([layer]),
            static.get("prob"),
        )

    def _source(self, layers: list[str]) -> str:
        if self.legacy:
            return f"{self.legacy.path} ({self.legacy.ranks})"
        keys = {
            scale.key for layer in layers for scale in self.store.found[layer].values()
        }
        return producers_of(keys, self.quantization)

    def _report(self, loaded: list[str]) -> None:
        if not loaded:
            logger.info(
                "fp8_inc: no KV scales in the checkpoint: dequant_scale 1.0 for all "
                "%d layers, served on %s (max %g)",
                len(self.layers),
                self.settings.device,
                self.settings.format.max,
            )
            return
        found = {layer: self.store.found[layer] for layer in loaded}
        mla = any(hasattr(module, "kv_lora_rank") for module in self.layers.values())
        on_hpu = hpu_worker.is_served_here()
        extra: list[Role] = ["q", "prob"]
        with_extra = [
            role for role in extra if all(role in roles for roles in found.values())
        ]
        logger.info(
            "fp8_inc: KV scales of %d of %d layers from %s%s; q %s, prob %s%s; "
            "made for %s (max %g; %s), served on %s (max %g): dequant scales x %.4g",
            len(loaded),
            len(self.layers),
            self._source(loaded),
            " (MLA: the larger of k and v for the latent)" if mla else "",
            *("loaded" if role in with_extra else "absent" for role in extra),
            "" if on_hpu else " (not quantised on CPU)",
            self.adjustment.quantised_for.name,
            self.adjustment.quantised_for.max,
            self.adjustment.reason,
            self.settings.device,
            self.settings.format.max,
            self.adjustment.factor,
        )
        if odd := implausible(found):
            logger.warning_once("fp8_inc: %s: %s", self.model, odd)


def _quantization_config(model_config: "ModelConfig") -> Any:
    """Old compressed-tensors checkpoints call it compression_config, as vLLM knows."""
    config = model_config.hf_config
    found = getattr(config, "quantization_config", None)
    return found or getattr(config, "compression_config", None)


def _legacy_scales(
    settings: Settings, model_config: "ModelConfig"
) -> LegacyScales | None:
    if settings.legacy_scales is None:
        return None
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return read_legacy_scales(
        settings.legacy_scales,
        model_config.hf_config.model_type,
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )
