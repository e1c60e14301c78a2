# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""INC's own parser, lists and scale calculators, driven on a CPU.

INC patches no attention module on CPU, so its convert() cannot be asked; the classes
that convert() calls can.
"""

import copy
import json

import torch
from neural_compressor.torch.algorithms.fp8_quant._core import utils
from neural_compressor.torch.algorithms.fp8_quant._core.patching_common import (
    _mod_default_dict as MODULE_TYPES,
)
from neural_compressor.torch.algorithms.fp8_quant._core.scale_methods import (
    ops_quantizer,
    scale_method_config,
)
from neural_compressor.torch.algorithms.fp8_quant._quant_common.quant_config import (
    Fp8cfg,
    ScaleFormat,
)
from neural_compressor.torch.algorithms.fp8_quant.model_configs import ModuleConfig
from neural_compressor.torch.utils.auto_accelerator import INCAcceleratorType

METHODS = list(scale_method_config.ScaleMethodString)


def parse(config: dict) -> dict:
    """INC's reading of a configuration; raises what INC raises.

    On a CPU INC insists on use_qdq, which changes no scale, and refuses it together
    with dynamic_quantization.
    """
    given = copy.deepcopy(config)
    given.setdefault("use_qdq", True)
    return Fp8cfg.parse(json.loads(json.dumps(given))).cfg


def quantises(cfg: dict, path: str, module_type: str) -> bool:
    """Whether INC would quantise the module."""
    cfg = cfg | {"mod_dict": {name: info.type for name, info in MODULE_TYPES.items()}}
    return utils.should_quantize(Fp8cfg(cfg), module_type, path)


def scales(cfg: dict, path: str, module_type: str, record, device: str, weight=None):
    """INC's scales of one measured module.

    Args:
        cfg: From ``parse``.
        path: Of the module.
        module_type: Its class.
        record: NodeRecord with the measurement.
        device: ``gaudi2`` or ``gaudi3``.
        weight: Of the module, if it has one.

    Returns:
        The dequant scales of its inputs, and of its weight (None without one).
    """
    module = torch.nn.Module()
    if weight is not None:
        module.weight = weight
    module.num_experts = len(record.outputs) - 1
    module.__hqt_config__ = Fp8cfg(
        {
            "device_for_scales": INCAcceleratorType[device.upper()],
            "mod_dict": {name: info.type for name, info in MODULE_TYPES.items()},
            "scale_format": ScaleFormat.CONST,
            "use_qdq": False,
            "fake_quant": False,
            "dynamic_quantization": False,
            "row_parallel_linear_allreduce_quantization": False,
        }
    )
    quantizer = ops_quantizer.get_op_quantizer(
        scale_method_config.find_node_scale_method_config(
            cfg["scale_method"], path, module_type
        ),
        module,
        ModuleConfig(record.inputs, record.outputs or (None,), {}),
        {"hp_dtype": cfg["hp_dtype"], "lp_dtype": torch.float8_e4m3fn},
        module_type,
    )
    found = quantizer.get_scales_module_config()
    params = found.params.get("weight")
    if isinstance(params, dict):
        params = params[0]
    return [s.item() for s in found.inputs], params
