# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The embedded bf16 model behind a real HTTP server, with QUANT_CONFIG."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.server import Server
from tests.e2e.test_server import QUESTIONS

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "device", ["gaudi2", pytest.param("gaudi3", marks=pytest.mark.slow)]
)
def test_the_embedded_model_answers_with_scales_of_inc(tmp_path, device):
    calibrated = load_file(EXAMPLES / "tiny-deepseek-v2-fp8" / "model.safetensors")
    nodes = {}
    for n in range(4):
        scale = calibrated[f"model.layers.{n}.self_attn.k_scale"].item()
        impl = f"model.layers.{n}.self_attn.mla_attn.mla_attn.impl"
        nodes[f"{impl}.latent_cache_k"] = {"inputs": [[[240 * scale]]]}
    measurement = tmp_path / "calibration" / "inc_hooks_maxabs_0_1.json"
    measurement.parent.mkdir()
    measurement.write_text(
        json.dumps({"LocalRank": 0, "Mode": "DynamicRange", "Nodes": nodes})
    )
    config = tmp_path / "quant.json"
    config.write_text(
        json.dumps(
            {
                "mode": "QUANTIZE",
                "scale_method": "maxabs_hw",
                "dump_stats_path": f"{measurement.parent}/inc",
                "allowlist": {"types": ["VLLMKVCache"], "names": []},
            }
        )
    )
    environment = {"QUANT_CONFIG": str(config)}
    model = EXAMPLES / "tiny-deepseek-v2"
    with Server(model, tmp_path / "log", device, [], environment) as server:
        answers = {
            question: server.complete(f"Question: {question}\nAnswer:")["text"]
            for question in QUESTIONS
        }
        log = server.log()
    for question, result in QUESTIONS.items():
        assert answers[question].endswith(f"#### {result}")
    assert "KV scales of 4 of 4 layers from QUANT_CONFIG" in log
    assert str(measurement) in log
