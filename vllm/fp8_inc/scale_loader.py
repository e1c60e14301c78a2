# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Matches the scales of a checkpoint to the attention layers of a model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.fp8_inc.adjustment import Adjustment, resolve_adjustment
from vllm.fp8_inc.layer_scales import LayerScales, is_mla
from vllm.fp8_inc.quant_config import kv_scales
from vllm.fp8_inc.ranks import tensor_parallel
from vllm.fp8_inc.scales import AttentionScales, StaticScale, give_scales
from vllm.fp8_inc.settings import Settings
from vllm.fp8_inc.sources.checkpoint import (
    declared_scheme,
    file_of,
    is_numbered_draft,
    key_in_layer,
    layer_index,
    layer_of,
    match_scale_key,
    producers_of,
)
from vllm.fp8_inc.sources.external import ExternalScales
from vllm.fp8_inc.sources.legacy_json import read_legacy_scales
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.shards import unlisted_scales
from vllm.fp8_inc.sources.store import FoundScale, ScaleStore
from vllm.fp8_inc.start_report import report_start
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

_UNIT_SCALES = "unit scales"
_SAVED = "a saved state"


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
        self.quantization = quantization_config(model_config)
        self.declared = declared_scheme(self.quantization)
        self.rank, self.ranks = tensor_parallel()
        self.external = kv_scales(layers, vllm_config, model_config) or legacy_scales(
            self.settings, model_config, self.rank, self.ranks
        )
        # A file beside the checkpoint was made by its own rules.
        self.adjustment: Adjustment = (
            self.external.adjustment
            if self.external
            else resolve_adjustment(self.quantization, self.settings.format)
        )
        self.layers: dict[str, LayerScales] = {}
        # Layers that read the KV cache of another one, whose scales are theirs.
        self.targets: dict[str, nn.Module] = {}
        for name, module in layers.items():
            layer = layer_of(name)
            if layer is None or layer in self.layers:
                raise ValueError(
                    f"--kv-cache-dtype fp8_inc: attention layer {name} cannot be "
                    "matched to the names of a checkpoint; serve this model with "
                    "--kv-cache-dtype auto"
                )
            self.layers[layer] = LayerScales(module)
            target = getattr(module, "kv_sharing_target_layer_name", None)
            if target is not None:
                context = vllm_config.compilation_config.static_forward_context
                self.targets[layer] = context[target]
        self.store = ScaleStore(self.model)
        self.is_loaded = False

    def set_unit_scales(self) -> None:
        """Sets dequant_scale 1.0 on every layer."""
        unit = StaticScale.from_dequant(1.0, self.dtype)
        for layer in self.layers.values():
            give_scales(layer.module, AttentionScales(unit, unit, None, _UNIT_SCALES))

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
            if self.external and match_scale_key(key):
                replaced += 1
            elif not self.store.take(key, tensor):
                yield key, tensor
        if self.external:
            self.store.found.update(self.external.found)
        if replaced:
            logger.info(
                "fp8_inc: %s replaces %d scales of the checkpoint",
                self.external.option,
                replaced,
            )

    def preview(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Checks the scales ``tensors`` of a checkpoint, before it is loaded.

        Raises:
            ValueError: As ``keep_back`` and ``finish`` do.
        """
        self.store.clear()
        if self.external:
            self.store.found.update(self.external.found)
        else:
            for key, tensor in tensors:
                self.store.take(key, tensor)
        self._match()
        self.store.clear()
        for scales in self.layers.values():
            scales.clear()

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
        missing = self._match()
        if missing and (self.declared or self.store.found):
            self._warn_of_unit_scales(missing)
        self.store.report_ignored()
        self._report(missing)
        self.is_loaded = True

    def _match(self) -> list[str]:
        """Gives the layers what was found; returns those that lack scales."""
        self._check_all_taken()
        missing = [layer for layer in self._owners() if not self._is_complete(layer)]
        if self.settings.missing_scales == "error":
            if not self.external:
                self._check_shards()
            if missing and (self.declared or self.store.found):
                self._refuse(missing)
        for layer, scales in self.layers.items():
            scales.clear()
            if layer not in missing and layer not in self.targets:
                self._take(layer, scales)
        self._hand_out(lambda layer: self._source([layer]))
        return missing

    def restore(self) -> None:
        """Hands out what came with a saved state instead of a checkpoint.

        Raises:
            ValueError: If K or V of a layer have no scale there.
        """
        if self.is_loaded:
            return
        for layer in self._owners():
            if not self.layers[layer].is_complete:
                raise ValueError(
                    f"{self.model}: the saved state has no KV scales of {layer}; save "
                    "it again from a model that is served with --kv-cache-dtype fp8_inc"
                )
        self._hand_out(lambda layer: _SAVED)
        logger.info(
            "fp8_inc: KV scales of %d layers from a saved state, served on %s (max %g)",
            len(self.layers),
            self.settings.device,
            self.settings.format.max,
        )

    def _owners(self) -> list[str]:
        """The layers with a KV cache of their own."""
        return [layer for layer in self.layers if layer not in self.targets]

    def _take(self, layer: str, scales: LayerScales) -> None:
        found = self.store.found[layer]
        self._check_granularity(found)
        try:
            scales.take(found, self.adjustment.amax, self.rank, self.ranks)
        except ValueError as error:
            raise ValueError(
                f"{self._file_of(found['k'].key)}: {layer}: {error}"
            ) from None

    def _check_granularity(self, found: Mapping[Role, FoundScale]) -> None:
        scheme = (self.quantization or {}).get("kv_cache_scheme") or {}
        if self.external or scheme.get("strategy") != "tensor":
            return
        for scale in found.values():
            if scale.per_head:
                raise ValueError(
                    f"{self._file_of(scale.key)}: {scale.key} holds "
                    f"{len(scale.per_head)} scales, but kv_cache_scheme.strategy of "
                    "config.json is 'tensor', which has one. Say 'attn_head' if each "
                    "head has its own, or quantise the cache again"
                )

    def _hand_out(self, source: Callable[[str], str]) -> None:
        """Builds the scales of every layer from their amax, or 1.0."""
        self.set_unit_scales()
        for layer in self._owners():
            scales = self.layers[layer]
            if not scales.is_complete:
                continue
            try:
                built = scales.scales(self.settings.format, self.dtype, source(layer))
            except ValueError as error:
                raise ValueError(f"{self.model}: {layer}: {error}") from None
            give_scales(scales.module, built)
        for layer, target in self.targets.items():
            shared = replace(
                target.impl.scales,
                q=None,
                prob=None,
                source=f"those of {target.layer_name}",
            )
            give_scales(self.layers[layer].module, shared)

    def _file_of(self, key: str) -> str:
        return self.external.path if self.external else file_of(key, self.model)

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
        known = self.num_layers + self.num_draft_layers
        return is_numbered_draft(layer) or layer_index(layer) < known

    def _check_shards(self) -> None:
        for path, key, scale in unlisted_scales(self.model):
            found = self.store.found.get(scale.layer, {})
            if scale.layer in self.layers and not found.keys() >= set(scale.roles):
                raise ValueError(
                    f"{path} holds {key}, which {scale.layer} lacks, but "
                    "model.safetensors.index.json does not name this file, so it is "
                    "not loaded. Add its keys to weight_map, or remove the file"
                )

    def _refuse(self, missing: list[str]) -> None:
        others = len(missing) - 1
        also = f" (and those of {others} more layers)" if others else ""
        raise ValueError(
            f"{self.external.path if self.external else self.model}: "
            f"{self._missing_keys(missing[0])} missing{also}, but "
            "quantization_config of config.json declares static KV scales "
            "(kv_cache_scheme or the like), or other layers have theirs. "
            "Add them (is their shard named in model.safetensors.index.json?), "
            'or set --additional-config \'{"fp8_inc": {"missing_scales": '
            '"unit"}}\' to use dequant_scale 1.0'
        )

    def _warn_of_unit_scales(self, missing: list[str]) -> None:
        logger.warning(
            "fp8_inc: missing_scales=unit: dequant_scale 1.0 for %d layers that "
            "lack scales (%s)",
            len(missing),
            ", ".join(missing),
        )

    def _missing_keys(self, layer: str) -> str:
        """The names that ``layer`` lacks, as other layers have them."""
        if self.external:
            return self.external.key_of.format(layer_index(layer))
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

    def _source(self, layers: list[str]) -> str:
        if self.external:
            return self.external.source
        keys = {
            scale.key for layer in layers for scale in self.store.found[layer].values()
        }
        return producers_of(keys, self.quantization)

    def _report(self, missing: list[str]) -> None:
        loaded = [layer for layer in self._owners() if layer not in missing]
        report_start(
            {layer: self.store.found[layer] for layer in loaded},
            self.adjustment,
            source=self._source(loaded) if loaded else "",
            layers=len(self.layers),
            sharing=len(self.targets),
            mla=any(is_mla(scales.module) for scales in self.layers.values()),
            model=self.model,
        )


def quantization_config(model_config: "ModelConfig") -> Any:
    """Old compressed-tensors checkpoints call it compression_config, as vLLM knows."""
    config = model_config.hf_config
    found = getattr(config, "quantization_config", None)
    return found or getattr(config, "compression_config", None)


def legacy_scales(
    settings: Settings, model_config: "ModelConfig", rank: int, ranks: int
) -> ExternalScales | None:
    if settings.legacy_scales is None:
        return None
    return read_legacy_scales(
        settings.legacy_scales,
        model_config.hf_config.model_type,
        rank,
        ranks,
        settings.format,
    )
