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

from tests.engines import attention_layers_of, engine
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
            "ranks": llm.collective_rpc(_rank),
        }
    for name in job["env"]:
        del os.environ[name]
    print(f"{job['options']} took {time.monotonic() - start:.1f} s", flush=True)
    names = ("graph_calls", "compiled", "mark_steps")
    now = (graphs.recorded.total(), len(compiling.compiled), core.mark_steps)
    return result | {
        name: after - before for name, before, after in zip(names, counts, now)
    }


def _rank(worker: Any) -> dict[str, Any]:
    """What one rank has; each runs this in its own process.

    Returns:
        ``dequant_scales`` of each layer, as the kernels get them: one, or a list;
        ``devices``, where parameters and buffers of the model say they are; and
        ``patched_by_inc``, INC's classes with the names that their modules have.
    """
    model = worker.model_runner.model
    tensors = (*model.parameters(), *model.buffers())
    patched = {
        f"{name.rpartition('.')[2]}: {type(module).__name__}"
        for name, module in model.named_modules()
        if type(module).__name__.startswith("Patched")
    }
    return {
        "dequant_scales": [_of_layer(x.impl) for x in attention_layers_of(model)],
        "devices": sorted({x.device.type for x in tensors}),
        "patched_by_inc": sorted(patched),
    }


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]), "utf-8")
