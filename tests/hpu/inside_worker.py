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

from tests.engines import attention_layers, engine
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
        }
    for name in job["env"]:
        del os.environ[name]
    print(f"{job['options']} took {time.monotonic() - start:.1f} s", flush=True)
    names = ("graph_calls", "compiled", "mark_steps")
    now = (graphs.recorded.total(), len(compiling.compiled), core.mark_steps)
    return result | {
        name: after - before for name, before, after in zip(names, counts, now)
    }


def _dequant_scales(llm: Any) -> list[dict[str, float]]:
    """The dequant scale of each cache of each layer, as the kernels get it."""
    if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        return []
    return [
        {
            name: getattr(layer.impl, name).scale.dequant_scale.item()
            for name in ("latent_cache_k", "k_cache", "v_cache")
            if hasattr(getattr(layer.impl, name, None), "scale")
        }
        for layer in attention_layers(llm)
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]), "utf-8")
