# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The observers see what is cached and multiplied, head by head."""

import time

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from tests.checkpoints import (
    BUILDERS,
    deepseek_config,
    llama_config,
    weights,
    write,
)
from tests.engines import attention_layers, engine, prompt
from vllm.fp8_inc.calibration.observers import (
    Observer,
    amax_of_heads,
    histogram_of_heads,
    percentile_of,
)
from vllm.fp8_inc.calibration.unify import growth, unify
from vllm.fp8_inc.calibration.worker import CalibrationWorker, qualified_name

OPTIONS = {
    "kv_cache_dtype": "auto",
    "enable_prefix_caching": False,
    "worker_extension_cls": qualified_name(CalibrationWorker),
}
PROMPTS = [prompt(40, seed=1), prompt(23, seed=2), prompt(61, seed=3)]


def run(llm, prompts, tokens: int = 1) -> None:
    from vllm import SamplingParams

    llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        use_tqdm=False,
    )


def observed(llm) -> dict[str, dict[str, list[float]]]:
    return llm.collective_rpc("kv_amax")[0][2]


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_maxima_are_those_of_the_cache(tmp_path, kind):
    """Chunked prefill, several requests, decode steps: every cached row counts."""
    config = BUILDERS[kind]()
    path = write(tmp_path, config, weights(config))
    with engine(path, max_num_batched_tokens=32, max_num_seqs=4, **OPTIONS) as llm:
        layers = attention_layers(llm)
        for layer in layers:
            layer.kv_cache.zero_()
        llm.collective_rpc("kv_observe", args=(False,))
        run(llm, PROMPTS, tokens=5)
        amax = observed(llm)
        for n, layer in enumerate(layers):
            seen = amax[f"layers.{n}"]
            if kind == "mla":
                latent, rope = layer.kv_cache.split([64, 32], dim=-1)
                assert seen["kv_c"] == [latent.abs().max().item()]
                assert seen["k_pe"] == [rope.abs().max().item()]
            else:
                assert max(seen["k"] + seen["v"]) == layer.kv_cache.abs().max().item()
                assert len(seen["k"]) == len(seen["v"]) == 2 and len(seen["q"]) == 4
        tokens = llm.collective_rpc("kv_amax")[0][3]
    assert set(tokens.values()) == {sum(map(len, PROMPTS)) + 3 * 4}


def transformers_amax(path: str, config: dict, monkeypatch) -> list[dict]:
    """The same from transformers in float32, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    queries, latents = [], []
    rotate = modeling_llama.apply_rotary_pos_emb

    def see(q, k, *args, **kwargs):
        rotated = rotate(q, k, *args, **kwargs)
        queries.append(rotated[0][0].abs().amax((1, 2)))
        return rotated

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", see)
    mla = "kv_lora_rank" in config
    for layer in model.model.layers if mla else ():
        layer.self_attn.kv_a_layernorm.register_forward_hook(
            lambda _, __, out: latents.append(out.abs().max())
        )
    count = config["num_hidden_layers"]
    result = [{} for _ in range(count)]

    def raise_to(n, role, value):
        result[n][role] = torch.maximum(result[n].get(role, value), value)

    for ids in PROMPTS:
        queries.clear(), latents.clear()
        with torch.inference_mode():
            cache = model(torch.tensor([ids]), use_cache=True).past_key_values
        for n, layer in enumerate(cache.layers):
            if mla:
                raise_to(n, "kv_c", latents[n])
                nope = config["qk_nope_head_dim"]
                raise_to(n, "k_pe", layer.keys[:, 0, :, nope:].abs().max())
            else:
                raise_to(n, "k", layer.keys[0].abs().amax((1, 2)))
                raise_to(n, "v", layer.values[0].abs().amax((1, 2)))
                raise_to(n, "q", queries[n])
    return result


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_maxima_are_those_of_transformers(tmp_path, kind, monkeypatch):
    config = BUILDERS[kind]()
    path = write(tmp_path, config, weights(config))
    expected = transformers_amax(path, config, monkeypatch)
    with engine(path, **OPTIONS) as llm:
        llm.collective_rpc("kv_observe", args=(False,))
        run(llm, PROMPTS)
        amax = observed(llm)
    for n, roles in enumerate(expected):
        for role, value in roles.items():
            seen = torch.tensor(amax[f"layers.{n}"][role])
            torch.testing.assert_close(seen, value.view(-1), rtol=0.03, atol=0)


def test_the_absorbed_query_is_the_one_of_decode(tmp_path):
    config = deepseek_config()
    path = write(tmp_path, config, weights(config))
    with engine(path, **OPTIONS) as llm:
        run(llm, PROMPTS[:1])
        llm.collective_rpc("kv_observe", args=(False,))
        layer = attention_layers(llm)[1]
        asked = layer.impl.forward_mqa
        decoded = []

        def see(q, *args):
            decoded.append(torch.cat(q, -1) if isinstance(q, tuple) else q.clone())
            return asked(q, *args)

        layer.impl.forward_mqa = see
        llm.collective_rpc("kv_keep", args=(True,))
        run(llm, PROMPTS[1:2], tokens=6)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        observer = worker.worker._observers["layers.1"]
        assert len(decoded) == 5
        torch.testing.assert_close(observer.kept["q_latent"], decoded[-1])
        most = torch.cat(decoded).abs().amax((0, 2)).float()
        assert (observer.amax["q_latent"] >= most).all()


def test_measuring_takes_less_than_a_tenth(tmp_path, monkeypatch):
    """CPU time inside the observers against that of the whole step."""
    config = llama_config()
    spent = []
    before = Observer._before

    def timed(self, *args):
        start = time.process_time()
        before(self, *args)
        spent.append(time.process_time() - start)

    monkeypatch.setattr(Observer, "_before", timed)
    with engine(write(tmp_path, config, weights(config)), **OPTIONS) as llm:
        run(llm, [prompt(200)])
        llm.collective_rpc("kv_observe", args=(False,))
        start = time.process_time()
        run(llm, [prompt(200, seed) for seed in range(16)])
        whole = time.process_time() - start
    assert spent and sum(spent) < 0.1 * (whole - sum(spent))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_amax_of_heads(dtype):
    x = torch.randn(17, 6, 5).to(dtype).transpose(0, 1)
    assert torch.equal(amax_of_heads(x), x.float().abs().amax((0, 2)))
    x[3, 2, 1] = float("-inf")
    assert amax_of_heads(x)[2] == float("inf")
    x[0, 2, 1] = float("nan")
    assert amax_of_heads(x)[2].isnan() and not amax_of_heads(x)[1].isnan()


def test_maxima_to_begin_with_go_where_the_values_are():
    observer = Observer(torch.nn.Module(), 1, amax={"k": torch.ones(2)})
    observer._see("k", torch.ones(3, 2, 4, device="meta"))
    assert observer.amax["k"].device.type == "meta"


@pytest.mark.parametrize("percent", [50.0, 99.0, 100.0])
def test_percentiles_are_at_most_a_bin_too_large(percent):
    x = (torch.randn(4000, 3, 4) * torch.tensor([1e-3, 1.0, 90.0])[:, None]).bfloat16()
    halves = x.split(1500)
    counts = sum(histogram_of_heads(half) for half in halves)
    found = percentile_of(counts, percent)
    for head in range(3):
        magnitudes = x[:, head].float().abs().flatten().sort().values
        exact = magnitudes[max(0, int(len(magnitudes) * percent / 100) - 1)]
        assert exact < found[head] <= exact * (1 + 1 / 8)


def test_ranks_are_joined():
    """Four query and two KV heads on two and on four ranks."""
    two = [
        (0, 2, {"layers.0": {"q": [1.0, 2.0], "k": [5.0]}}),
        (1, 2, {"layers.0": {"q": [3.0, 0.5], "k": [7.0]}}),
    ]
    joined = {"q": [1.0, 2.0, 3.0, 0.5], "k": [5.0, 7.0]}
    assert unify(two, 4, 2, True) == {"layers.0": joined}
    assert unify(two, 4, 2, False) == {"layers.0": {"q": [3.0], "k": [7.0]}}
    four = [(r, 4, {"layers.0": {"k": [5.0 + r]}}) for r in range(4)]
    assert unify(four, 4, 2, True) == {"layers.0": {"k": [6.0, 8.0]}}
    latent = [(r, 2, {"layers.0": {"kv_c": [2.0]}}) for r in range(2)]
    assert unify(latent, 4, 4, True) == {"layers.0": {"kv_c": [2.0]}}
    stages = [(0, 1, {"layers.0": {"k": [1.0]}}), (0, 1, {"layers.1": {"k": [2.0]}})]
    assert set(unify(stages, 4, 1, False)) == {"layers.0", "layers.1"}


def test_growth_names_the_riser():
    before = {"layers.0": {"k": [1.0], "v": [4.0]}}
    after = {"layers.0": {"k": [1.5], "v": [4.4]}}
    assert growth(before, after) == (0.5, "k of layers.0")
