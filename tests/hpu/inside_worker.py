# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Runs engines on the HPU worker: the other side of tests/hpu/worker.py.

Reads jobs as JSON from the file that is the first argument, and writes their results to
the second.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])

import engines
import forced


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Starts one engine and asks it."""
    os.environ.update(job["env"])
    if runtime := sys.modules.get("vllm_gaudi.extension.runtime"):
        runtime.clear_config()  # the platform reads it before the worker clears it
    try:
        with engines.engine(job["model"], **job["options"], **forced.OPTIONS) as llm:
            return {
                "distributions": forced.distributions(
                    llm,
                    job["prompts"],
                    job["forced"],
                    job["steps"],
                    llm.llm_engine.model_config.get_vocab_size(),
                ),
                "scales": _scales(llm) if job["scales"] else None,
            }
    except Exception as error:
        if not job["may_fail"]:
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for name in job["env"]:
            del os.environ[name]


def _scales(llm: Any) -> list[dict[str, float]]:
    """The dequant scales in each layer's cache modules, as the kernels get them."""
    result = []
    for layer in engines.attention_layers(llm):
        caches = {
            name: getattr(layer.impl, name).scale.dequant_scale.item()
            for name in ("latent_cache_k", "k_cache", "v_cache")
            if hasattr(layer.impl, name)
        }
        result.append(caches)
    return result


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    results = [run(job) for job in jobs]
    Path(sys.argv[2]).write_text(json.dumps(results), "utf-8")
