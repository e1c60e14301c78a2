# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A calibration as INC's measurement and quant-config JSON, in the layout of 2026.

INC itself reads only the .npz beside the JSON, a pickled dictionary, which is never
written here; this fork reads the JSON. See docs/calibration.md.
"""

from pathlib import Path
from typing import Any

from vllm.fp8_inc.calibration.result import Calibration

CONFIG_NAME = "quantize.json"
_FOLDER = "inc_output"


def inc_files(
    calibration: Calibration, scale_method: str, ranks: int, out: Path
) -> dict[str, Any]:
    """File name -> content.

    Every rank gets the unified maxima.

    Args:
        calibration: Of granularity tensor.
        scale_method: As INC names it.
        ranks: Tensor-parallel ranks that will serve.
        out: The folder, which the configuration names.
    """
    nodes: dict[str, Any] = {}
    for layer in calibration.scaled:
        nodes |= _nodes(layer, calibration)
    files: dict[str, Any] = {
        CONFIG_NAME: {
            "mode": "QUANTIZE",
            "observer": "maxabs",
            "scale_method": scale_method,
            "allowlist": {"types": ["VLLMKVCache"], "names": []},
            "blocklist": {"types": [], "names": []},
            "dump_stats_path": str(out.resolve() / _FOLDER / "inc_output"),
        }
    }
    for rank in range(ranks):
        name = f"{_FOLDER}/inc_output_hooks_maxabs_{rank}_{ranks}.json"
        files[name] = {
            "GlobalRank": None,
            "LocalRank": rank,
            "Mode": "DynamicRange",
            "Nodes": nodes,
        }
    return files


def _nodes(layer: str, calibration: Calibration) -> dict[str, Any]:
    roles = calibration.scaled[layer]
    k, v, q = (_one(roles[role]) for role in ("k", "v", "q"))
    if calibration.attention == "MLA":
        impl = f"model.{layer}.self_attn.mla_attn.mla_attn.impl"
        caches = {f"{impl}.latent_cache_k": {"inputs": [k]}}
        # Decode multiplies the latent with the absorbed query, and P with the latent.
        decode_q, decode_v = _one(roles["q_latent"]), k
    else:
        impl = f"model.{layer}.self_attn.attn.impl"
        caches = {
            f"{impl}.k_cache": {"inputs": [k]},
            f"{impl}.v_cache": {"inputs": [v]},
        }
        decode_q, decode_v = q, v
    # The worker multiplies the query of a decode step with it first.
    decode_q = [[decode_q[0][0] * calibration.softmax_scale[layer]]]
    prob = [[1.0]]
    return {
        f"{impl}.matmul_qk": {"inputs": [decode_q, k]},
        f"{impl}.matmul_av": {"inputs": [prob, decode_v]},
        **caches,
    }


def _one(amax: list[float]) -> list[list[float]]:
    return [[max(amax)]]
