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
from safetensors import SafetensorError
from torch import nn

from vllm.fp8_inc import hpu_worker
from vllm.fp8_inc.early_checks import check_scales
from vllm.fp8_inc.environment import report_on_cpu
from vllm.fp8_inc.scale_loader import ScaleLoader
from vllm.fp8_inc.settings import Settings
from vllm.fp8_inc.sources.checkpoint import match_scale_key
from vllm.fp8_inc.sources.shards import check_readable
from vllm.logger import init_logger
from vllm.utils.torch_utils import is_quantized_kv_cache

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

CACHE_DTYPE = "fp8_inc"
# Load formats that copy the state of a model that ran before.
_SAVED_STATES = ("sharded_state", "runai_streamer_sharded", "tensorizer")


def attach(
    model: nn.Module, vllm_config: "VllmConfig", model_config: "ModelConfig"
) -> None:
    """Makes ``model.load_weights`` load KV scales; called on each new model.

    Without an fp8_inc layer the model keeps its own ``load_weights``, but for
    checkpoints of a quant_method of ours on an unquantised cache: there the scales
    are dropped with one line, since no layer has a parameter for them.

    Raises:
        ValueError: If config.json declares a scheme that cannot be served.
    """
    from vllm.fp8_inc.layers.served import ServedOnCpu
    from vllm.fp8_inc.plugin import QUANT_METHODS
    from vllm.platforms import current_platform

    on_hpu = hpu_worker.is_served_here()
    if not (on_hpu or current_platform.is_cpu()):
        return
    quant_config = vllm_config.quant_config
    ours = isinstance(quant_config, ServedOnCpu)
    upstreams = not type(quant_config).__module__.startswith("vllm.fp8_inc.")
    known = quant_config and not on_hpu
    if known and upstreams and quant_config.get_name() in QUANT_METHODS:
        raise ValueError(
            "the entry point fp8_inc of vllm.general_plugins was not loaded; add "
            "fp8_inc to VLLM_PLUGINS, or unset it"
        )
    layers = {
        module.layer_name: module
        for module in model.modules()
        if getattr(module, "kv_cache_dtype", None) == CACHE_DTYPE
        and hasattr(module, "layer_name")  # an implementation may be a module too
    }
    if not layers and Settings.of(vllm_config).legacy_scales:
        logger.warning_once(
            "fp8_inc: legacy_scales is not used: no layer has --kv-cache-dtype fp8_inc"
        )
    if layers:
        if on_hpu:
            hpu_worker.prepare(layers.values())
        else:
            report_on_cpu()
        loader = ScaleLoader(layers, vllm_config, model_config)
        check_scales(loader, model_config, vllm_config.load_config)
        # Models that are never loaded (--load-format dummy) still can run.
        loader.set_unit_scales()
        for scales in loader.layers.values():
            scales.join_state()
    elif ours and not is_quantized_kv_cache(vllm_config.cache_config.cache_dtype):
        loader = _IgnoredScales()
    else:
        return
    load_weights = model.load_weights

    @functools.wraps(load_weights)
    def load_weights_and_scales(
        weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any
    ) -> Any:
        try:
            loaded = load_weights(loader.keep_back(weights), *args, **kwargs)
        except SafetensorError as error:
            path = model_config.model
            check_readable(path)
            raise ValueError(f"{path}: {error}: copy or download it again") from error
        loader.finish()
        return loaded

    model.load_weights = load_weights_and_scales
    if layers and vllm_config.load_config.load_format in _SAVED_STATES:
        _restore_afterwards(model, loader)


def _restore_afterwards(model: nn.Module, loader: ScaleLoader) -> None:
    """A saved state is copied into ``state_dict`` and needs no load_weights."""
    process = getattr(model, "process_weights_after_loading", None)

    def process_and_restore() -> None:
        if process is not None:
            process()
        loader.restore()

    model.process_weights_after_loading = process_and_restore


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
