# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""How each producer names scales and declares them in config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_DECLARATIONS = ("kv_cache_scheme", "kv_cache_quant_algo")


@dataclass(frozen=True)
class Form:
    """A form of checkpoints.

    Attributes:
        names: Role -> what follows the attention module.
        shape: Of a scale of one number.
        per_head: Whether it knows a scale a head.
        config: quantization_config where the checkpoint has none of its own.
        declare: The entries that say so in any config, by granularity.
        fused: Name for k and v of MLA, where it has one.
    """

    names: Mapping[str, str]
    shape: tuple[int, ...]
    per_head: bool
    config: Mapping[str, Any]
    declare: Callable[[bool], Mapping[str, Any]]
    fused: str | None = None


def _scheme(per_head: bool) -> dict[str, Any]:
    strategy = "attn_head" if per_head else "tensor"
    return {"kv_cache_scheme": {**_FP8, "strategy": strategy}}


FORMS = {
    "compressed-tensors": Form(
        {role: f"{role}_scale" for role in ("k", "v", "q", "q_latent", "prob")},
        (1,),
        True,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
        },
        _scheme,
    ),
    "modelopt": Form(
        {role: f"{role}_proj.{role}_scale" for role in ("k", "v")},
        (),
        False,
        {"quant_method": "modelopt"},
        lambda per_head: {"kv_cache_quant_algo": "FP8"},
    ),
    "autofp8": Form(
        {role: f"{role}_scale" for role in ("k", "v")},
        (1,),
        False,
        {"quant_method": "fp8", "activation_scheme": "static"},
        _scheme,
    ),
    "quark": Form(
        {role: f"{role}_proj.output_scale" for role in ("k", "v", "q")}
        | {"prob": "prob_output_scale"},
        (),
        False,
        {"quant_method": "quark"},
        lambda per_head: {"export": {"kv_cache_group": ["*k_proj", "*v_proj"]}},
        fused="kv_b_proj.output_scale",
    ),
}


def quantization_config(
    form: Form, own: Mapping[str, Any], per_head: bool, flavor: str
) -> dict[str, Any]:
    """The checkpoint's own, or the form's, with the form's declaration.

    Weights stay as they are, so quant_method does too where there is one.
    """
    config = dict(own) or dict(form.config)
    for name in _DECLARATIONS:
        config.pop(name, None)
    export = dict(config.pop("export", None) or {})
    export.pop("kv_cache_group", None)
    declared = dict(form.declare(per_head))
    export |= declared.pop("export", {})
    if export:
        config["export"] = export
    return config | declared | {"fp8_dtype_flavor": flavor}
