# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Intel Neural Compressor inside the worker: it measures, and our attention serves.

INC patches the other modules, by its own convert. A process for each start: the worker
reads QUANT_CONFIG as it is imported.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ml_dtypes import bfloat16

from tests.checkpoints import llama_config, weights, write
from tests.device_numbers import MAXIMUM
from tests.engines import acting, engine
from tests.hpu.forced import OPTIONS, distributions, divergence
from tests.hpu.test_worker_serves import BF16, FP8, random_tokens, texts
from tests.hpu.worker import ROOT, Job, needs_worker, run_jobs

pytestmark = [needs_worker, pytest.mark.slow]
MLA_MODEL = str(ROOT / "examples" / "tiny-deepseek-v2")
# The scales that cost nothing on the matrix engine.
HARDWARE = {"gaudi2": [2.0**n for n in (-8, -4, 0, 4)],
            "gaudi3": [2.0**n for n in range(-55, 8)]}  # fmt: skip
# Of MLA, whose first input is the latent, q of the prefill and the absorbed q.
INPUTS = ("latent_cache_k", "fused_scaled_dot_product_attention", "matmul_qk")
CASES = {"mla": "gaudi3", "gqa": "gaudi2"}


@dataclass
class Outcome:
    """What INC measured, and two engines with its files.

    Attributes:
        kind: ``mla`` or ``gqa``.
        device: That serves.
        nodes: Path -> amax of each input.
        measuring: What tests/hpu/inside_worker.py found while INC measured, over a
            bf16 cache.
        serving: The same of the engine that serves.
        on_cpu: Distributions of the CPU backend.
    """

    kind: str
    device: str
    nodes: Mapping[str, list[float]]
    measuring: Mapping[str, Any]
    serving: Mapping[str, Any]
    on_cpu: torch.Tensor


@pytest.fixture(scope="module", params=CASES)
def outcome(request, tmp_path_factory):
    kind, device = request.param, CASES[request.param]
    folder = tmp_path_factory.mktemp(kind)
    model, (prompts, forced) = MLA_MODEL, texts()
    if kind == "gqa":
        config = llama_config(max_position_embeddings=512)
        model = write(folder / "model", config, weights(config))
        prompts, forced = random_tokens()

    def start(mode: str, options: dict) -> dict[str, Any]:
        jobs = {"one": Job(model, [prompts], forced, options=options)}
        path = quant_config(folder, mode)
        return run_jobs(folder, jobs, SOFT_GAUDI=device, QUANT_CONFIG=path)["one"]

    measuring = start("MEASURE", BF16)
    serving = start("QUANTIZE", FP8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANT_CONFIG", quant_config(folder, "QUANTIZE"))
        options = FP8 | OPTIONS | {"additional_config": {"fp8_inc": {"device": device}}}
        with engine(model, **options) as llm:
            on_cpu = distributions(llm, prompts, forced, 3, together=False)
    nodes = measurements(folder, "0_1")
    return Outcome(kind, device, nodes, measuring, serving, on_cpu)


@dataclass
class TwoRanks:
    """The same of an engine over two ranks.

    Attributes:
        nodes: Of each rank: path -> amax of each input.
        serving: What tests/hpu/inside_worker.py found.
        files: That INC wrote in all.
    """

    nodes: list[Mapping[str, list[float]]]
    serving: Mapping[str, Any]
    files: set[str]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Gaudi3, with the flag; the method tells any two measurements apart."""
    folder = tmp_path_factory.mktemp("ranks")
    prompts, forced = texts()
    both = {"tensor_parallel_size": 2, "quantization": "inc"}

    def start(mode: str, options: dict) -> dict[str, Any]:
        jobs = {"one": Job(MLA_MODEL, [prompts], forced, options=options | both)}
        path = quant_config(folder, mode, "maxabs_arbitrary")
        return run_jobs(folder, jobs, SOFT_GAUDI="gaudi3", QUANT_CONFIG=path)["one"]

    start("MEASURE", BF16)
    nodes = [measurements(folder, f"{rank}_2") for rank in (0, 1)]
    serving = start("QUANTIZE", FP8)
    return TwoRanks(nodes, serving, {path.name for path in (folder / "inc").iterdir()})


def measurements(folder: Path, ranks: str) -> dict[str, list[float]]:
    measured = json.loads((folder / "inc" / f"m_hooks_maxabs_{ranks}.json").read_text())
    return {
        path: [amax[0][0] for amax in node["inputs"]]
        for path, node in measured["Nodes"].items()
    }


def quant_config(folder: Path, mode: str, method: str = "maxabs_hw") -> str:
    (folder / "inc").mkdir(exist_ok=True)
    path = folder / f"{mode}.json"
    config = {
        "mode": mode,
        "observer": "maxabs",
        "scale_method": method,
        "blocklist": {"types": [], "names": ["lm_head", r"layers\.1\..*o_proj"]},
        "dump_stats_path": f"{folder}/inc/m",
    }
    path.write_text(json.dumps(config))
    return str(path)


def scale_of(amax: float, device: str) -> float:
    """maxabs_hw, by trial; inputs are mapped to a quarter of the range.

    Each step of INC's is bfloat16: 1.7578125 / 112, a little above 2^-6, is 2^-6.
    """
    target = float(bfloat16(amax / (MAXIMUM[device] * 0.25)))
    power = float(bfloat16(math.log2(target)))
    return min(scale for scale in HARDWARE[device] if math.log2(scale) >= power)


def exact(amax: float) -> float:
    """maxabs_arbitrary on Gaudi3."""
    return float(bfloat16(amax / (MAXIMUM["gaudi3"] * 0.25)))


def inputs(outcome: Outcome, layer: int, name: str) -> list[float]:
    parent = "mla_attn.mla_attn" if outcome.kind == "mla" else "attn"
    return outcome.nodes[f"model.layers.{layer}.self_attn.{parent}.impl.{name}"]


def test_inc_measures_the_modules_of_the_worker(outcome):
    cache = "latent_cache_k" if outcome.kind == "mla" else "k_cache"
    patched = outcome.measuring["patched_by_inc"]
    assert {f"{cache}: PatchedVLLMKVCache", "matmul_qk: PatchedMatmul"} <= set(patched)
    assert (
        "MEASURE.json measures: the attention modules are the worker's"
        in (outcome.measuring["log"])
    )


def test_every_layer_serves_with_the_scales_of_the_measurements(outcome):
    device, layers = outcome.device, outcome.serving["dequant_scales"]
    caches = ("latent_cache_k",) if outcome.kind == "mla" else ("k_cache", "v_cache")
    assert len(layers) == (4 if outcome.kind == "mla" else 3)
    for n, layer in enumerate(layers):
        for cache in caches:
            (amax,) = inputs(outcome, n, cache)
            assert layer[cache] == scale_of(amax, device)
        prompt_q = inputs(outcome, n, "fused_scaled_dot_product_attention")[0]
        assert layer["q"] == scale_of(prompt_q, device)
        assert layer["prob"] == scale_of(1.0, device)
        if outcome.kind == "gqa":
            assert layer["q of decode"] == layer["q"]
            continue
        # The worker multiplies the absorbed query by the softmax scale first.
        absorbed = scale_of(inputs(outcome, n, "matmul_qk")[0], device)
        assert layer["q of decode"] * layer["softmax"] == pytest.approx(
            absorbed, rel=2**-8
        )


def test_inc_quantises_everything_but_our_attention(outcome):
    patched = set(outcome.serving["patched_by_inc"])
    if outcome.kind == "mla":
        assert {
            "o_proj: PatchedRowParallelLinear",
            "kv_b_proj: PatchedColumnParallelLinear",
            "moe_op: PatchedVllmMixtureOfExpertsOp",
        } <= patched
    else:
        assert {
            "qkv_proj: PatchedColumnParallelLinear",
            "down_proj: PatchedRowParallelLinear",
        } <= patched
    ours = ("PatchedMatmul", "PatchedVLLMKVCache", "PatchedModuleFusedSDPA")
    assert not [name for name in patched if name.endswith(ours)]


def test_the_cpu_backend_computes_the_same_with_the_same_files(outcome):
    """It reads the scales that INC's convert has cached beside the measurements."""
    ours = divergence(outcome.on_cpu, outcome.serving["distributions"][0])
    other = divergence(outcome.on_cpu, outcome.on_cpu.roll(1, 0))
    assert ours.median() < (1e-3 if outcome.kind == "mla" else 0.02) < other.median()


def test_every_rank_measures_and_serves_with_files_of_its_own(two_ranks):
    for rank, found in enumerate(two_ranks.serving["ranks"]):
        assert f"m_hooks_maxabs_MAXABS_ARBITRARY_{rank}_2.json" in two_ranks.files
        assert (
            f"m_hooks_maxabs_{rank}_2.json (rank {rank} of 2)"
            in (two_ranks.serving["log"])
        )
        for n, layer in enumerate(found["dequant_scales"]):
            impl = f"model.layers.{n}.self_attn.mla_attn.mla_attn.impl"
            cache, q, absorbed = (
                acting(exact(two_ranks.nodes[rank][f"{impl}.{name}"][0]))
                for name in INPUTS
            )
            assert layer["latent_cache_k"] == pytest.approx(cache, rel=1e-6)
            assert layer["q"] == pytest.approx(q, rel=1e-6)
            assert layer["q of decode"] * layer["softmax"] == pytest.approx(
                absorbed, rel=2**-7
            )


def test_ranks_differ_in_q_and_share_the_latent(two_ranks):
    one, other = (found["dequant_scales"] for found in two_ranks.serving["ranks"])
    alike = {
        role: [a[role] == b[role] for a, b in zip(one, other, strict=True)]
        for role in ("latent_cache_k", "q", "q of decode")
    }
    assert alike["latent_cache_k"] == [True] * 4
    assert not all(alike["q"]) and not all(alike["q of decode"])


def test_inc_quantises_the_layers_of_every_rank(two_ranks):
    one, other = (set(found["patched_by_inc"]) for found in two_ranks.serving["ranks"])
    assert one == other
    assert {
        "o_proj: PatchedRowParallelLinear",
        "moe_op: PatchedVllmMixtureOfExpertsOp",
    } <= one


@pytest.mark.parametrize("outcome", ["mla"], indirect=True)
def test_two_ranks_agree_with_one_and_with_a_bf16_cache(outcome, two_ranks):
    ours = two_ranks.serving["distributions"][0]
    for expected in (outcome.measuring, outcome.serving):
        expected = expected["distributions"][0]
        other = divergence(expected, expected.roll(1, 0))
        assert divergence(expected, ours).median() < 1e-3 < other.median()
