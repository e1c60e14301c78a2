# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""QUANT_CONFIG, the JSON of Intel Neural Compressor (INC).

It is read once a process, where layers and scales are built. On CPU also where vLLM's
configuration is completed, so that layers whose cache its lists leave out are built
with an unquantised one. On HPU all layers have one cache dtype, and INC itself
quantises everything but attention.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.early_checks import check_configuration
from vllm.fp8_inc.hpu_worker import is_hpu
from vllm.fp8_inc.layer_scales import is_mla
from vllm.fp8_inc.ranks import tensor_parallel
from vllm.fp8_inc.settings import Settings
from vllm.fp8_inc.sources.checkpoint import layer_of
from vllm.fp8_inc.sources.external import ExternalScales
from vllm.fp8_inc.sources.inc.read import read_inc_scales
from vllm.fp8_inc.sources.inc.scales import IncScales
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.store import FoundScale
from vllm.logger import init_logger
from vllm.v1.attention.selector import _cached_get_attn_backend

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

ENV = "QUANT_CONFIG"
_DIGEST = "fp8_inc_quant_config"
_read = functools.cache(read_inc_scales)


def configure_on_cpu(vllm_config: "VllmConfig") -> None:
    """Applies QUANT_CONFIG to a configuration, if it is set; called by patches/vllm.

    Upstream's memory of chosen backends is emptied: its key lacks the cache dtype of
    the engine, which decides for a layer that keeps an unquantised cache.

    Its lists choose the layers whose cache stays unquantised and, in a checkpoint
    without quantised weights, the Linear layers and experts that become FP8.

    Raises:
        ValueError: Naming file, layer, key and value, and the way out.
    """
    _cached_get_attn_backend.cache_clear()
    model_config = vllm_config.model_config
    if model_config is None:
        return
    if vllm_config.cache_config.cache_dtype == "fp8_inc":
        check_configuration(vllm_config, os.environ.get(ENV))
    if not os.environ.get(ENV):
        return
    from vllm.fp8_inc.layers.inc_quant_config import IncQuantConfig

    inc = read_for(vllm_config, rank=0)
    if isinstance(vllm_config.additional_config, dict):
        # Part of the key of vLLM's compile cache: other lists give another graph.
        digest = hashlib.sha256(Path(inc.path).read_bytes()).hexdigest()
        vllm_config.additional_config[_DIGEST] = digest
    if vllm_config.cache_config.cache_dtype == "fp8_inc":
        skipped = vllm_config.cache_config.kv_cache_dtype_skip_layers
        for n in range(model_config.get_total_num_hidden_layers()):
            name = f"model.layers.{n}.self_attn.attn"
            plain = f"layers.{n}" in inc.excluded or not inc.quantises_cache(
                name, model_config.use_mla
            )
            if plain and str(n) not in skipped:
                skipped.append(str(n))
    if model_config.quantization in (None, "inc"):
        vllm_config.quant_config = IncQuantConfig(inc.path)
    else:
        logger.info_once(
            "fp8_inc: QUANT_CONFIG gives the scales of the KV cache only: the weights "
            "of the checkpoint are quantised already (%s)",
            model_config.quantization,
        )


def read_for(vllm_config: "VllmConfig", rank: int | None = None) -> IncScales:
    """Reads the files of a rank, by default of this process; once a process."""
    if rank is None:
        rank, size = tensor_parallel()
    else:
        size = vllm_config.parallel_config.tensor_parallel_size
    experts = vllm_config.model_config.get_num_experts()
    device = Settings.of(vllm_config).device
    return _read(os.environ[ENV], device, rank, size, experts or None)


def kv_scales(
    layers: dict[str, nn.Module],
    vllm_config: "VllmConfig",
    model_config: "ModelConfig",
) -> ExternalScales | None:
    """The scales of the attention layers of a model, if QUANT_CONFIG is set.

    Args:
        layers: The layers with an fp8_inc cache, by name.
        vllm_config: Of the engine.
        model_config: Of this model; a draft model has its own checkpoint's scales.

    Raises:
        ValueError: If a layer was not measured, or its cache is not to be quantised.
    """
    target = vllm_config.model_config
    if not os.environ.get(ENV) or target is None or model_config.model != target.model:
        return None
    inc = read_for(vllm_config)
    if is_hpu():
        _wait_for_all_ranks()
    # Layers that the model lacks too: the files may be of another model.
    found = {layer: _known(roles, 1.0) for layer, roles in inc.attention.items()}
    for name, module in layers.items():
        if getattr(module, "kv_sharing_target_layer_name", None) is None:
            roles = inc.scales_of(name, is_mla(module))
            if roles is None:
                raise ValueError(
                    f"{inc.path}: by its lists, or for want of a measurement, the "
                    f"cache of {name} stays unquantised, but --kv-cache-dtype fp8_inc "
                    "makes it FP8. Change the lists, or serve with auto"
                )
            found[layer_of(name) or name] = _known(roles, module.impl.scale)
    files = ", ".join(inc.files) or "no files"
    served_on = Settings.of(vllm_config).format
    return ExternalScales(
        option=ENV,
        path=inc.files[0] if inc.files else inc.path,
        source=f"{ENV} {inc.path}: {files} ({inc.ranks})",
        key_of="the KV cache of layers.{}",
        found=found,
        adjustment=Adjustment(served_on, served_on, f"by {ENV}"),
    )


def _wait_for_all_ranks() -> None:
    """INC's convert adds files to the folder that a slower rank has yet to read."""
    from vllm.distributed import get_world_group

    if get_world_group().world_size > 1:
        get_world_group().barrier()


def _known(
    roles: dict[str, FoundScale], softmax_scale: float
) -> dict[Role, FoundScale]:
    """The roles that we use; the absorbed query is measured times the softmax scale."""
    known: dict[Role, FoundScale] = {}
    for role, scale in roles.items():
        if role == "q_latent":
            scale = FoundScale(scale.key, scale.dequant_scale / softmax_scale)
        if role != "q_decode":
            known[role] = scale
    return known
