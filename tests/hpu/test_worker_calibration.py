# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""`vllm kv-scales calibrate` on the HPU worker measures what it measures on CPU."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.checkpoints import llama_config, weights, write
from tests.hpu.worker import ROOT, environment, needs_worker, watched

pytestmark = [needs_worker, pytest.mark.slow]

TINY = ROOT / "examples" / "tiny-deepseek-v2"
TEXTS = ROOT / "examples" / "calibration-texts.jsonl"


@pytest.fixture(params=["mla", "gqa"])
def model(request, tmp_path) -> Path:
    if request.param == "mla":
        return TINY
    config = llama_config(vocab_size=640, max_position_embeddings=1024)
    path = Path(write(tmp_path / "gqa", config, weights(config)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path)
    return path


def measured(model: Path, out: Path, env: dict[str, str]) -> dict:
    """The result of prompts of unequal lengths, so that batches are padded."""
    words = ["--output-dir", out, "--dataset", TEXTS, "--num-prompts", 6]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "kv-scales"]
    arguments = [*command, "calibrate", *map(str, [model, *words])]
    code, log = watched(arguments, env, ROOT)
    assert code == 0, log[-8000:]
    return json.loads((out / "kv-scales-calibration.json").read_text())


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_it_measures_the_same_as_on_cpu(tmp_path, model, lazy):
    hpu = environment(SOFT_GAUDI="gaudi2", PT_HPU_LAZY_MODE=lazy)
    found = measured(model, tmp_path / "hpu", hpu)
    expected = measured(model, tmp_path / "cpu", dict(os.environ))
    assert found["tokens"] == expected["tokens"] > 1000
    assert found["amax"].keys() == expected["amax"].keys()
    for layer, roles in expected["amax"].items():
        assert found["amax"][layer].keys() == roles.keys()
        for role, amax in roles.items():
            # bf16 results of sums in another order.
            assert found["amax"][layer][role] == pytest.approx(amax, rel=0.02)
