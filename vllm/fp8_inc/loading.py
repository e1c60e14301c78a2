# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Gives every attention layer with an fp8_inc cache the scales of its checkpoint.

The models' own ``load_weights`` differ, and two generations of renaming sit
before them: that is where scales get lost. So scales do not travel through them:
``attach`` wraps ``load_weights`` of a new model, keeps back every key that
``sources.checkpoint`` knows, and hands the scales to the layers once the
weights are in. Reloads take the same way.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.fp8_inc.adjustment import Adjustment, resolve_adjustment
from vllm.fp8_inc.environment import check_on_cpu
from vllm.fp8_inc.scales import AttentionScales, StaticScale, read_dequant_scale
from vllm.fp8_inc.settings import Settings
from vllm.fp8_inc.sources.checkpoint import (
    Role,
    declared_scheme,
    file_of,
    layer_index,
    layer_of,
    match_scale_key,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

CACHE_DTYPE = "fp8_inc"
_UNIT_SCALES = "unit scales"


def attach(
    model: nn.Module, vllm_config: "VllmConfig", model_config: "ModelConfig"
) -> None:
    """Makes ``model.load_weights`` load KV scales; called on each new model.

    Without an fp8_inc layer the model keeps its own ``load_weights``, but for
    compressed-tensors and fp8 checkpoints on an unquantised cache: there the scales
    are dropped with one line, since no layer has a parameter for them.

    Raises:
        ValueError: If config.json declares a scheme that cannot be served.
    """
    from vllm.fp8_inc.layers.recipe import ServedOnCpu
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    quant_config = vllm_config.quant_config
    ours = isinstance(quant_config, ServedOnCpu)
    if type(quant_config) in (CompressedTensorsConfig, Fp8Config):
        raise ValueError(
            "the entry point fp8_inc of vllm.general_plugins was not loaded; add "
            "fp8_inc to VLLM_PLUGINS, or unset it"
        )
    layers = {
        module.layer_name: module
        for module in model.modules()
        if getattr(module, "kv_cache_dtype", None) == CACHE_DTYPE
    }
    if layers:
        check_on_cpu()
        loader = ScaleLoader(layers, vllm_config, model_config)
        # Models that are never loaded (--load-format dummy) still can run.
        loader.set_unit_scales()
    elif ours:
        loader = _IgnoredScales()
    else:
        return
    load_weights = model.load_weights

    @functools.wraps(load_weights)
    def load_weights_and_scales(
        weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any
    ) -> Any:
        loaded = load_weights(loader.keep_back(weights), *args, **kwargs)
        loader.finish()
        return loaded

    model.load_weights = load_weights_and_scales


class _IgnoredScales:
    """Drops the scales of a checkpoint that is served with an unquantised cache."""

    def __init__(self) -> None:
        self.dropped = 0

    def keep_back(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in weights:
            if match_scale_key(key) is None:
                yield key, tensor
            else:
                self.dropped += 1

    def finish(self) -> None:
        if self.dropped:
            logger.info_once(
                "fp8_inc: the KV cache is not quantised; %d KV scales of the "
                "checkpoint are ignored (--kv-cache-dtype fp8_inc uses them)",
                self.dropped,
            )
        self.dropped = 0


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
        quantization = getattr(model_config.hf_config, "quantization_config", None)
        self.declared = declared_scheme(quantization)
        self.adjustment: Adjustment = resolve_adjustment(
            quantization, self.settings.format
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
        self.found: dict[str, dict[Role, tuple[str, float]]] = {}

    def set_unit_scales(self) -> None:
        """Sets dequant_scale 1.0 on every layer."""
        unit = StaticScale.from_dequant(1.0, self.dtype)
        for module in self.layers.values():
            module.impl.scales = AttentionScales(unit, unit, None, _UNIT_SCALES)

    def keep_back(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes weights through and keeps the scales.

        Raises:
            ValueError: For a scale that is not a positive finite number.
        """
        self.found.clear()
        for key, tensor in weights:
            scale = match_scale_key(key)
            if scale is None:
                yield key, tensor
                continue
            try:
                value = read_dequant_scale(tensor)
            except ValueError as error:
                raise ValueError(
                    f"{file_of(key, self.model)}: {key} {error}. Calibrate the "
                    "checkpoint again, or serve with --kv-cache-dtype auto"
                ) from None
            roles = self.found.setdefault(scale.layer, {})
            known = roles.setdefault(scale.role, (key, value))
            if known != (key, value):
                raise ValueError(
                    f"{file_of(key, self.model)}: {key} ({value:g}) and {known[0]} "
                    f"({known[1]:g}) are both for {scale.role} of {scale.layer}; "
                    "remove one"
                )

    def finish(self) -> None:
        """Hands out the scales and reports them in one line.

        Raises:
            ValueError: If scales are missing that the checkpoint declares, or
                present for a layer that the model does not have.
        """
        self._check_all_taken()
        missing = [layer for layer in self.layers if not self._is_complete(layer)]
        if missing and (self.declared or self.found):
            self._refuse_or_warn(missing)
        self.set_unit_scales()
        for layer, module in self.layers.items():
            if layer not in missing:
                module.impl.scales = self._scales_of(layer, module)
        self._report(len(self.layers) - len(missing))

    def _is_complete(self, layer: str) -> bool:
        return {"k", "v"} <= self.found.get(layer, {}).keys()

    def _check_all_taken(self) -> None:
        for layer, roles in self.found.items():
            if layer not in self.layers and not self._is_elsewhere(layer):
                key = next(iter(roles.values()))[0]
                raise ValueError(
                    f"{file_of(key, self.model)}: {key} belongs to no attention "
                    f"layer of the model, which has {sorted(self.layers)}"
                )

    def _is_elsewhere(self, layer: str) -> bool:
        """Whether another rank or model, or an unquantised layer, is meant."""
        return layer_index(layer) < self.num_layers + self.num_draft_layers

    def _refuse_or_warn(self, missing: list[str]) -> None:
        layer = missing[0]
        roles = [role for role in ("k", "v") if role not in self.found.get(layer, {})]
        keys = ", ".join(f"{layer}.{role}_scale" for role in roles)
        if self.settings.missing_scales == "error":
            raise ValueError(
                f"{self.model}: {keys} and the scales of {len(missing) - 1} more "
                "layers are missing, but config.json declares "
                "quantization_config.kv_cache_scheme or other layers have theirs. "
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

    def _scales_of(self, layer: str, module: nn.Module) -> AttentionScales:
        values = {role: value for role, (_, value) in self.found[layer].items()}
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
            key = self.found[layer]["k"][0]
            raise ValueError(f"{file_of(key, self.model)}: {key}: {error}") from None
        return AttentionScales(
            static["k"], static["v"], static.get("q"), "compressed-tensors"
        )

    def _report(self, loaded: int) -> None:
        if not loaded:
            logger.info(
                "fp8_inc: no KV scales in the checkpoint: dequant_scale 1.0 for all "
                "%d layers, served on %s (max %g)",
                len(self.layers),
                self.settings.device,
                self.settings.format.max,
            )
            return
        mla = any(hasattr(module, "kv_lora_rank") for module in self.layers.values())
        has_q = all("q" in roles for roles in self.found.values())
        logger.info(
            "fp8_inc: KV scales of %d of %d layers from compressed-tensors%s; q %s "
            "(not quantised on CPU); made for %s (max %g; %s), served on %s (max %g): "
            "dequant scales x %.4g",
            loaded,
            len(self.layers),
            " (MLA: the larger of k and v for the latent)" if mla else "",
            "loaded" if has_q else "absent",
            self.adjustment.quantised_for.name,
            self.adjustment.quantised_for.max,
            self.adjustment.reason,
            self.settings.device,
            self.settings.format.max,
            self.adjustment.factor,
        )
