# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Runs engines on the HPU worker: the other side of tests/hpu/worker.py.

Reads jobs as JSON from the file that is the first argument, and writes their results to
the second.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.engines import attention_layers, engine, model_of
from tests.hpu.forced import OPTIONS, distributions


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Starts one engine and asks it once for each list of prompts."""
    from habana_frameworks.torch import core
    from soft_gaudi import compiling, graphs
    from vllm_gaudi.extension import runtime

    start = time.monotonic()
    os.environ.update(job["env"])
    runtime.clear_config()  # the platform reads it before the worker clears it
    counts = (graphs.recorded.total(), len(compiling.compiled), core.mark_steps)
    with engine(job["model"], **job["options"], **OPTIONS) as llm:
        result = {
            "distributions": [
                distributions(llm, prompts, job["forced"], job["steps"]).tolist()
                for prompts in job["rounds"]
            ],
            "dequant_scales": _dequant_scales(llm),
            "devices": _devices(llm),
            "patched_by_inc": _patched_by_inc(llm),
        }
    for name in job["env"]:
        del os.environ[name]
    print(f"{job['options']} took {time.monotonic() - start:.1f} s", flush=True)
    names = ("graph_calls", "compiled", "mark_steps")
    now = (graphs.recorded.total(), len(compiling.compiled), core.mark_steps)
    return result | {
        name: after - before for name, before, after in zip(names, counts, now)
    }


def _dequant_scales(llm: Any) -> list[dict[str, Any]]:
    """The dequant scales of each layer, as the kernels get them: one, or a list."""
    if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        return []
    return [_of_layer(layer.impl) for layer in attention_layers(llm)]


def _devices(llm: Any) -> list[str]:
    """Where parameters and buffers of the model say they are."""
    if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        return []
    model = model_of(llm)
    return sorted({x.device.type for x in (*model.parameters(), *model.buffers())})


def _of_layer(impl: Any) -> dict[str, Any]:
    names = ("latent_cache_k", "k_cache", "v_cache")
    found = {name: getattr(getattr(impl, name, None), "scale", None) for name in names}
    if pieces := getattr(impl, "fp8_inc", None):
        found["q of decode"] = pieces.decode.q_scale
        found["prob"] = pieces.decode.prob_scale
        found |= dict(pieces.prompt.scales.items())
    scales = {
        name: scale.dequant_scale.tolist()
        for name, scale in found.items()
        if scale is not None
    }
    return scales | {"softmax": impl.scale}


def _patched_by_inc(llm: Any) -> list[str]:
    """INC's classes in the model, with the name that their modules have."""
    if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        return []
    found = {
        f"{name.rpartition('.')[2]}: {type(module).__name__}"
        for name, module in model_of(llm).named_modules()
        if type(module).__name__.startswith("Patched")
    }
    return sorted(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]), "utf-8")
