# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The load of benchmarks/load.py in a short form: no problem, some preemption."""

import pytest

from benchmarks.load import run

# RSS at the end over RSS at half time. A minute is no warm-up: buffers still grow.
GROWTH = 1.05


@pytest.mark.slow
def test_clients_that_misbehave(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    result = run(clients=64, seconds=60, log=tmp_path / "log")
    assert not result["problems"], result["problems"][:5]
    assert result["finished, equal"] > 20
    assert result["preemptions"] > 0
    for act in ("cancelled", "disconnected", "refused, no_json", "refused, oversized"):
        assert result[act] > 0
    assert result["refused, other_model"] > 0
    ties = result.get("finished, equal up to a tie", 0)
    assert ties < result["finished, equal"] / 4
    assert result["RSS at the end, MB"] < GROWTH * result["RSS at half, MB"]
