# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What takes a compiler, or a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.checkpoints import (
    deepseek_config,
    kv_scales,
    quantization_config,
    quantize,
    weights,
    write,
)
from tests.engines import ask, engine, prompt


@pytest.fixture
def checkpoint(tmp_path):
    config = deepseek_config()
    config["quantization_config"] = quantization_config()
    return write(tmp_path, config, quantize(weights(config)) | kv_scales(config))


@pytest.mark.slow
def test_torch_compile_changes_nothing(checkpoint):
    """Inductor must not fuse the casts: their product has a rounding of its own."""
    answers = []
    for eager in (True, False):
        with engine(checkpoint, dtype="float32", enforce_eager=eager) as llm:
            answers.append(ask(llm, [prompt(40)])[0])
    difference = (answers[0].logprobs - answers[1].logprobs).abs()
    assert difference.median().item() < 1e-4
    assert answers[0].generated == answers[1].generated


@pytest.mark.slow
def test_a_plugin_that_is_left_out_is_an_error(checkpoint):
    script = (
        "from tests.engines import engine\n"
        f"with engine({checkpoint!r}): print('it runs')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"VLLM_PLUGINS": "lora_filesystem_resolver"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode != 0 and "it runs" not in result.stdout
    assert "add fp8_inc to VLLM_PLUGINS" in result.stderr
