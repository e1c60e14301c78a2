# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The patched HPU worker serves, and computes what the CPU backend computes."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests import test_per_head as per_head
from tests.checkpoints import (
    kv_scales,
    llama_config,
    quantization_config,
    weights,
    write,
)
from tests.device_numbers import MAXIMUM
from tests.engines import acting, engine
from tests.hpu.forced import OPTIONS, distributions, divergence
from tests.hpu.worker import ROOT, Job, needs_worker, run_jobs

pytestmark = needs_worker
MODEL = str(ROOT / "examples" / "tiny-deepseek-v2-fp8")
# Around the worker's block size of 128, and one that a chunk of 256 cuts.
LENGTHS = (20, 127, 128, 200, 300)
LENGTH = {"max_model_len": 384, "max_num_batched_tokens": 384}
FP8 = LENGTH | {"kv_cache_dtype": "fp8_inc", "dtype": "bfloat16", "max_num_seqs": 4}
BF16 = FP8 | {"kv_cache_dtype": "auto"}
CHUNKED = {"max_num_batched_tokens": 256}
CONTIGUOUS = {"VLLM_CONTIGUOUS_PA": "true"}
# One bucket of prompts and one of decodes, so that warm-up runs few of them.
FEW_BUCKETS = {
    "VLLM_PROMPT_QUERY_BUCKET_MIN": "384",
    "VLLM_PROMPT_CTX_BUCKET_MAX": "0",
    "VLLM_DECODE_BS_BUCKET_MIN": "2",
    "VLLM_DECODE_BLOCK_BUCKET_MIN": "8",
}


def texts() -> tuple[list[list[int]], list[int]]:
    """Pieces of the calibration texts, and the token after each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{MODEL}/tokenizer.json")
    lines = (ROOT / "examples" / "calibration-texts.jsonl").read_text("utf-8")
    ids = []
    for line in lines.splitlines()[:40]:
        ids += tokenizer.encode(json.loads(line)["text"]).ids
    prompts, following, place = [], [], 0
    for length in LENGTHS:
        prompts.append(ids[place : place + length])
        following.append(ids[place + length])
        place += length + 10
    return prompts, following


def random_tokens() -> tuple[list[list[int]], list[int]]:
    """For the GQA model, which is not trained."""
    prompts = [[(7 * i * i + 3 * i + n) % 128 for i in range(n)] for n in LENGTHS[:4]]
    return prompts, [5, 17, 90, 63]


@pytest.fixture(scope="module")
def gqa_model(tmp_path_factory) -> str:
    config = llama_config(max_position_embeddings=512)
    config["quantization_config"] = quantization_config(config_groups={})
    tensors = weights(config) | kv_scales(config)
    return write(tmp_path_factory.mktemp("gqa"), config, tensors)


@pytest.fixture(scope="module")
def per_head_model(tmp_path_factory) -> str:
    """The same with a scale for each head."""
    config = llama_config(max_position_embeddings=512)
    config["quantization_config"] = quantization_config(
        config_groups={}, kv_cache_scheme=per_head.SCHEME
    )
    tensors = weights(config) | per_head.scales([-1])
    return write(tmp_path_factory.mktemp("per_head"), config, tensors)


def job(model: str, options: dict, rounds: int = 1, **kwargs) -> Job:
    prompts, forced = texts() if model == MODEL else random_tokens()
    return Job(model, [prompts] * rounds, forced, options=options, **kwargs)


@pytest.fixture(scope="module")
def gaudi3(tmp_path_factory, gqa_model, per_head_model):
    """Eager, with prefix caching where not said otherwise."""
    jobs = {
        "fp8": job(MODEL, FP8, rounds=2),
        "gqa": job(gqa_model, FP8),
        "per head": job(per_head_model, FP8),
        "chunked": job(MODEL, FP8 | CHUNKED, env=CONTIGUOUS),
        "chunked bf16": job(MODEL, BF16 | CHUNKED, env=CONTIGUOUS),
        "bf16": job(MODEL, BF16),
    }
    return run_jobs(tmp_path_factory.mktemp("gaudi3"), jobs, SOFT_GAUDI="gaudi3")


@pytest.fixture(scope="module")
def gaudi2(tmp_path_factory, gqa_model):
    """Lazy, with graphs and warm-up."""
    graphs = {"enforce_eager": False, "max_num_seqs": 2}
    jobs = {"fp8": job(MODEL, FP8 | graphs), "gqa": job(gqa_model, FP8 | graphs)}
    return run_jobs(
        tmp_path_factory.mktemp("gaudi2"),
        jobs,
        SOFT_GAUDI="gaudi2",
        PT_HPU_LAZY_MODE="1",
        **FEW_BUCKETS,
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """With torch.compile."""
    jobs = {"fp8": job(MODEL, FP8 | {"enforce_eager": False})}
    folder = tmp_path_factory.mktemp("compiled")
    return run_jobs(folder, jobs, SOFT_GAUDI="gaudi3", **FEW_BUCKETS)


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory):
    """The worker as it is, on the same software Gaudi."""
    jobs = {"chunked bf16": job(MODEL, BF16 | CHUNKED, env=CONTIGUOUS)}
    return run_jobs(
        tmp_path_factory.mktemp("unpatched"), jobs, False, SOFT_GAUDI="gaudi3"
    )


@pytest.fixture(scope="module")
def on_cpu():
    """Distributions of the CPU backend, each engine started once."""
    known = {}

    def distributions_of(model: str, device: str | None) -> torch.Tensor:
        if (model, device) not in known:
            options = FP8 if device else BF16
            config = {"fp8_inc": {"device": device}} if device else {}
            asked = job(model, options)
            with engine(model, additional_config=config, **options, **OPTIONS) as llm:
                known[model, device] = distributions(
                    llm, asked.rounds[0], asked.forced, asked.steps, together=False
                )
        return known[model, device]

    return distributions_of


@pytest.fixture(params=["gaudi3", "gaudi2"])
def served(request):
    """A chip, and what the worker answered on it."""
    return request.param, request.getfixturevalue(request.param)


def test_mla_agrees_with_the_cpu_backend(served, on_cpu):
    device, results = served
    ours = divergence(on_cpu(MODEL, device), results["fp8"]["distributions"][0])
    assert ours.median() < 1e-3
    assert ours.mean() < 0.02


def test_gqa_agrees_with_the_cpu_backend(served, on_cpu, gqa_model):
    """q and P are quantised on HPU only; another prompt's answer is off by some 1."""
    device, results = served
    expected = on_cpu(gqa_model, device)
    ours = divergence(expected, results["gqa"]["distributions"][0])
    assert ours.median() < 0.02 < divergence(expected, expected.roll(1, 0)).median()


def test_every_layer_computes_with_the_scales_of_the_checkpoint(served, gqa_model):
    device, results = served
    stored = kv_scales(llama_config())
    factor = MAXIMUM["gaudi3"] / MAXIMUM[device]
    for n, layer in enumerate(results["gqa"]["dequant_scales"]):
        for role in "kv":
            scale = stored[f"model.layers.{n}.self_attn.{role}_scale"].item()
            assert layer[f"{role}_cache"] == acting(scale * factor)


def test_every_head_has_its_own_scale(gaudi3):
    """The fused kernel of the prefill takes none per head: it measures its tensors."""
    for n, layer in enumerate(gaudi3["per head"]["dequant_scales"]):
        names = {"k": "k_cache", "v": "v_cache", "q": "q of decode"}
        for role, heads in per_head.HEADS.items():
            expected = [acting(scale) for scale in per_head.values(role, n, heads)]
            assert layer[names[role]] == expected
        assert not {"q", "k", "v"} & layer.keys()


def test_scales_per_head_agree_with_the_cpu_backend(gaudi3, on_cpu, per_head_model):
    expected = on_cpu(per_head_model, "gaudi3")
    ours = divergence(expected, gaudi3["per head"]["distributions"][0])
    assert ours.median() < 0.02 < divergence(expected, expected.roll(1, 0)).median()


def test_the_latent_has_the_larger_scale_of_k_and_v(served):
    device, results = served
    factor = MAXIMUM["gaudi2"] / MAXIMUM[device]  # the model is made for 240
    with safe_open(Path(MODEL) / "model.safetensors", "pt") as weights:
        for n, layer in enumerate(results["fp8"]["dequant_scales"]):
            larger = max(
                weights.get_tensor(f"model.layers.{n}.self_attn.{role}_scale").item()
                for role in "kv"
            )
            assert layer["latent_cache_k"] == pytest.approx(
                acting(larger * factor), rel=1e-6
            )


def test_an_fp8_cache_costs_little_beside_a_bf16_cache(gaudi3):
    fp8, bf16 = (gaudi3[name]["distributions"][0] for name in ("fp8", "bf16"))
    assert divergence(bf16, fp8).median() < 1e-3


def test_a_hit_in_the_prefix_cache_changes_little(gaudi3):
    first, second = gaudi3["fp8"]["distributions"]
    assert divergence(first, second).median() < 1e-3
    assert not first.equal(second)  # else there was no hit


def test_chunks_over_contiguous_blocks_read_their_own_context(gaudi3, unpatched):
    whole = gaudi3["bf16"]["distributions"][0]
    ours = gaudi3["chunked bf16"]["distributions"][0]
    theirs = unpatched["chunked bf16"]["distributions"][0]
    assert divergence(whole, ours).max() < 0.05
    assert divergence(whole, theirs).max() > 1


def test_fp8_chunks_over_contiguous_blocks(gaudi3):
    fp8, chunked = (gaudi3[name]["distributions"][0] for name in ("fp8", "chunked"))
    assert divergence(fp8, chunked).median() < 1e-3


@pytest.mark.slow
def test_torch_compile_changes_little(gaudi3, compiled):
    assert compiled["fp8"]["compiled"] > 0 == gaudi3["fp8"]["compiled"]
    eager, ours = (r["fp8"]["distributions"][0] for r in (gaudi3, compiled))
    assert divergence(eager, ours).median() < 1e-3


def test_the_model_lies_on_the_device(served):
    """The one in C++, where a mix-up is an error; without a compiler, cpu."""
    built = "hpu" if shutil.which("c++") else "cpu"
    expected = os.environ.get("SOFT_GAUDI_TENSORS") or built
    assert {tuple(result["devices"]) for result in served[1].values()} == {(expected,)}


def test_lazy_mode_records_graphs(gaudi2):
    assert gaudi2["fp8"]["graph_calls"] > 0
    assert gaudi2["fp8"]["mark_steps"] > 0
