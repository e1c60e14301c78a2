# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes configurations and INC's files for the tests."""

import json
from pathlib import Path

from vllm.fp8_inc.sources.inc.read import read_inc_scales

SAMPLES = Path(__file__).parent / "samples"


def write_config(folder, **keys):
    """Writes a configuration whose files are ``folder/inc_output_...``."""
    path = folder / "quant.json"
    path.write_text(json.dumps({"dump_stats_path": f"{folder}/inc_output"} | keys))
    return str(path)


def write_file(folder, nodes, suffix="", mode="DynamicRange"):
    """Writes a measurement, or a scale file where ``suffix`` names a method."""
    path = folder / f"inc_output_hooks_maxabs{suffix}.json"
    path.write_text(json.dumps({"LocalRank": 0, "Mode": mode, "Nodes": nodes}))
    return path


def measured(*inputs, outputs=None, weight=None):
    """A module as INC writes its measurement."""
    node = {"inputs": [[[value]] for value in inputs]}
    if outputs:
        node["outputs"] = [[[value]] for value in outputs]
    if weight is not None:
        node["params"] = {"weight": [[weight]]}
    return node


def cached(*inputs, weight=None):
    """A module as INC writes its scales."""
    params = {} if weight is None else {"weight": weight}
    return {"inputs": list(inputs), "outputs": [1.0], "params": params}


def mha(layer, k, v, q=8.0, decode=0.7):
    """The attention modules of one MHA layer, measured."""
    at = f"model.layers.{layer}.self_attn.attn.impl."
    return {
        at + "k_cache": measured(k),
        at + "v_cache": measured(v),
        at + "matmul_qk": measured(decode, k),
        at + "matmul_av": measured(1.0, v),
        at + "fused_scaled_dot_product_attention": measured(q, k, v, outputs=[v, 1.0]),
    }


def mla(layer, latent, q=12.0, decode=1.5, at="mla_attn.mla_attn.impl"):
    """The attention modules of one MLA layer, measured."""
    at = f"model.layers.{layer}.self_attn.{at}."
    return {
        at + "latent_cache_k": measured(latent),
        at + "matmul_qk": measured(decode, latent),
        at + "matmul_av": measured(1.0, latent),
        at + "fused_scaled_dot_product_attention": measured(
            q, latent, 0.07, outputs=[0.05, 1.0]
        ),
    }


def read(folder, device="gaudi3", rank=0, size=1, num_experts=None, **keys):
    """Reads the files in ``folder``."""
    return read_inc_scales(
        write_config(folder, **keys), device, rank, size, num_experts
    )


def values(scales, layer):
    """Role -> dequant scale of one layer."""
    return {
        role: found.dequant_scale for role, found in scales.attention[layer].items()
    }
