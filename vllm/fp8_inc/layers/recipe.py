# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""How a checkpoint quantised its Linear layers and experts to FP8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.fp8_inc.adjustment import Adjustment, resolve_adjustment
from vllm.fp8_inc.settings import Settings
from vllm.utils.torch_utils import is_quantized_kv_cache


@dataclass(frozen=True)
class Fp8Recipe:
    """W8A8 FP8 as a checkpoint declares it.

    Attributes:
        weights: What one weight scale covers: all of a projection ("tensor"), one
            output channel, or a block of output channels x inputs.
        static_inputs: Whether the checkpoint has an input_scale for each
            projection. Without one activations are quantised per token as they
            come: the device's worker does so for every dynamic scheme, per tensor
            and per group too, and so does upstream where a kernel for it exists.
        adjustment: The rule of this checkpoint.
        block: Rows and columns of a block.
        scale_name: What the checkpoint calls the dequant scale of a weight.
    """

    weights: Literal["tensor", "channel", "block"]
    static_inputs: bool
    adjustment: Adjustment
    block: tuple[int, int] = (128, 128)
    scale_name: str = "weight_scale"


class ServedOnCpu:
    """Marks the quantisation configs whose FP8 layers are ours on CPU."""

    def adjustment_for(self, config: Mapping[str, Any] | None) -> Adjustment:
        """The adjustment rule of ``quantization_config`` on the device served."""
        settings = Settings.of(get_current_vllm_config())
        return resolve_adjustment(config, settings.format)


def upstream_serves_cache() -> bool:
    """Whether the KV cache is quantised, and not as fp8_inc.

    Then upstream's KV method loads the scales; otherwise loading.py does.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return True
    dtype = config.cache_config.cache_dtype
    return is_quantized_kv_cache(dtype) and dtype != "fp8_inc"
