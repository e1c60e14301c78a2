# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""QUANT_CONFIG in real engines: the same as its scales put into a checkpoint."""

import pytest
import torch

from tests.checkpoints import (
    BUILDERS,
    deepseek_config,
    llama_config,
    quantization_config,
    weights,
    write,
)
from tests.device_numbers import cast
from tests.engines import ask, attention_layers, engine, model_of, prompt
from tests.sources.inc import helpers
from tests.sources.inc.helpers import measured

MAXIMUM = {"gaudi2": 240.0, "gaudi3": 448.0}
KV_ONLY = {"blocklist": {"types": [], "names": ["proj", "lm_head", "experts"]}}


def k_amax(n: int) -> float:
    return 2.9 + 1.3 * n


def v_amax(n: int) -> float:
    return 1.1 + 0.4 * n


def attention_nodes(kind: str) -> dict:
    nodes = {}
    for n in range(3):
        if kind == "gqa":
            nodes |= helpers.mha(n, k_amax(n), v_amax(n))
        else:
            nodes |= helpers.mla(n, k_amax(n))
    return nodes


def pow2_scale(amax: float, maximum: float, backoff: float) -> float:
    """maxabs_pow2, in another way than the product: by trial."""
    target, power = amax / (maximum * backoff), 2.0**-40
    while power < target:
        power *= 2
    return power


@pytest.fixture
def quant_config(tmp_path, monkeypatch):
    """Writes measurements and a configuration, and names it in the environment."""

    def set_up(nodes: dict, **keys) -> str:
        helpers.write_file(tmp_path, nodes, "_0_1")
        path = helpers.write_config(
            tmp_path, **{"mode": "QUANTIZE", "scale_method": "maxabs_pow2"} | keys
        )
        monkeypatch.setenv("QUANT_CONFIG", path)
        return path

    return set_up


def served(path: str, device: str, **options):
    """Answer, cache bytes and scales of an engine."""
    extra = {"additional_config": {"fp8_inc": {"device": device}}}
    with engine(path, **extra, **options) as llm:
        answer = ask(llm, [prompt(30)])[0]
        layers = attention_layers(llm)
        caches = [layer.kv_cache.view(torch.uint8).clone() for layer in layers]
        return answer, caches, [layer.impl.scales for layer in layers]


@pytest.mark.parametrize(
    "kind, device",
    [
        ("mla", "gaudi3"),
        ("gqa", "gaudi2"),
        pytest.param("mla", "gaudi2", marks=pytest.mark.slow),
        pytest.param("gqa", "gaudi3", marks=pytest.mark.slow),
    ],
)
def test_the_cache_is_that_of_the_same_scales_in_a_checkpoint(
    tmp_path, monkeypatch, quant_config, caplog_vllm, kind, device
):
    config = BUILDERS[kind]()
    plain = write(tmp_path / "plain", config, weights(config))
    path = quant_config(attention_nodes(kind), **KV_ONLY)
    answer, caches, scales = served(plain, device)
    monkeypatch.delenv("QUANT_CONFIG")
    said = caplog_vllm.text
    for part in ("KV scales of 3 of 3 layers from QUANT_CONFIG", path, "_hooks_maxabs"):
        assert part in said

    same = {}
    for n in range(3):
        amax = {"k": k_amax(n), "v": v_amax(n) if kind == "gqa" else k_amax(n)}
        for role, value in amax.items():
            same[f"model.layers.{n}.self_attn.{role}_scale"] = torch.tensor(
                pow2_scale(value, MAXIMUM[device], 0.25)
            )
        assert scales[n].k.dequant_scale == same[f"model.layers.{n}.self_attn.k_scale"]
    config["quantization_config"] = quantization_config(config_groups={})
    monkeypatch.setenv("VLLM_SCALE_ADJUSTMENT", "false")  # made for this device
    with_scales = write(tmp_path / "scales", config, weights(config) | same)
    other, other_caches, _ = served(with_scales, device)
    assert torch.equal(answer.logprobs, other.logprobs)
    assert any(cache.any() for cache in caches)
    for cache, wanted in zip(caches, other_caches, strict=True):
        assert torch.equal(cache, wanted)


def test_the_absorbed_query_is_taken_without_the_softmax_scale(tmp_path, quant_config):
    config = deepseek_config()
    path = write(tmp_path / "plain", config, weights(config))
    quant_config(attention_nodes("mla"), **KV_ONLY)
    _, _, (first, *_) = served(path, "gaudi3")
    softmax_scale = (32 + 32) ** -0.5
    measured_one = pow2_scale(1.5, 448, 0.25)
    assert first.q_latent.dequant_scale == measured_one / softmax_scale
    assert first.q.dequant_scale == pow2_scale(12.0, 448, 0.25)


@pytest.mark.parametrize("kind", BUILDERS)
def test_blocked_layers_keep_a_bf16_cache(tmp_path, quant_config, kind):
    config = BUILDERS[kind]()
    path = write(tmp_path / "plain", config, weights(config))
    names = [*KV_ONLY["blocklist"]["names"], r"layers\.1\."]
    quant_config(attention_nodes(kind), blocklist={"types": [], "names": names})
    with engine(path) as llm:
        layers = attention_layers(llm)
        found = [(layer.kv_cache_dtype, layer.kv_cache.dtype) for layer in layers]
    fp8 = ("fp8_inc", torch.float8_e4m3fn)
    # vLLM may hold FP8 as bytes.
    kinds = [
        (name, "bf16" if dtype == torch.bfloat16 else "8 bits") for name, dtype in found
    ]
    assert kinds == [(fp8[0], "8 bits"), ("auto", "bf16"), (fp8[0], "8 bits")]


def linear_nodes(names: list[str]) -> dict:
    """Every Linear layer: no two have the same amax."""
    return {
        name: measured(3.3 + 0.7 * i, outputs=[1.0], weight=0.6 + 0.05 * i)
        for i, name in enumerate(names)
    }


FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


@pytest.mark.parametrize(
    "device, quantization",
    [("gaudi2", "inc"), pytest.param("gaudi3", None, marks=pytest.mark.slow)],
)
def test_linear_layers_are_those_of_a_checkpoint_with_the_same_scales(
    tmp_path, monkeypatch, quant_config, device, quantization
):
    config = llama_config()
    tensors = weights(config)
    plain = write(tmp_path / "plain", config, tensors)
    names = [
        f"model.layers.{n}.{part}"
        for n in range(3)
        for part in (
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "mlp.gate_up_proj",
            "mlp.down_proj",
        )
    ]
    nodes = linear_nodes(names)
    # The last layer's down_proj stays in bf16.
    blocklist = {"types": [], "names": ["lm_head", r"2\.mlp\.down_proj"]}
    quant_config(attention_nodes("gqa") | nodes, blocklist=blocklist)
    answer, caches, _ = served(plain, device, quantization=quantization)
    monkeypatch.delenv("QUANT_CONFIG")

    maximum, fp8 = MAXIMUM[device], dict(tensors)
    for name in names[:-1]:
        node = nodes[name]
        inputs = pow2_scale(node["inputs"][0][0][0], maximum, 0.25)
        of_weight = pow2_scale(node["params"]["weight"][0][0], maximum, 0.5)
        parent, _, leaf = name.rpartition(".")
        for part in FUSED.get(leaf, [leaf]):
            weight = fp8[f"{parent}.{part}.weight"]
            codes = cast(weight, 1 / of_weight, device)
            fp8[f"{parent}.{part}.weight"] = torch.from_numpy(codes).view(
                torch.float8_e4m3fn
            )
            fp8[f"{parent}.{part}.weight_scale"] = torch.tensor([of_weight])
            fp8[f"{parent}.{part}.input_scale"] = torch.tensor([inputs])
    for n in range(3):
        for role, amax in (("k", k_amax(n)), ("v", v_amax(n))):
            fp8[f"model.layers.{n}.self_attn.{role}_scale"] = torch.tensor(
                [pow2_scale(amax, maximum, 0.25)]
            )
    config["quantization_config"] = quantization_config(
        ignore=["lm_head", "model.layers.2.mlp.down_proj"]
    )
    monkeypatch.setenv("VLLM_SCALE_ADJUSTMENT", "false")
    other, other_caches, _ = served(write(tmp_path / "fp8", config, fp8), device)
    assert torch.equal(answer.logprobs, other.logprobs)
    for cache, wanted in zip(caches, other_caches, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize(
    "device", ["gaudi2", pytest.param("gaudi3", marks=pytest.mark.slow)]
)
def test_experts_are_those_of_a_checkpoint_with_the_same_scales(
    tmp_path, monkeypatch, quant_config, device
):
    config = deepseek_config()
    tensors = weights(config)
    plain = write(tmp_path / "plain", config, tensors)
    nodes = {}
    for n in (1, 2):
        at = f"model.layers.{n}.mlp.experts.routed_experts.moe_op"
        inner = [0.9 + 0.8 * e + 0.1 * n for e in range(4)]
        nodes[at] = measured(2.1 * n, outputs=[1.0, *inner])
        for e in range(4):
            nodes[f"{at}.w13_list.{e}"] = measured(0.0, weight=0.5 + 0.3 * e)
            nodes[f"{at}.w2_list.{e}"] = measured(0.0, weight=0.4 + 0.5 * e)
    blocklist = {"types": [], "names": ["proj", "lm_head"]}
    quant_config(attention_nodes("mla") | nodes, blocklist=blocklist)
    answer, _, _ = served(plain, device)
    monkeypatch.delenv("QUANT_CONFIG")

    maximum, fp8 = MAXIMUM[device], dict(tensors)

    def quantise(name: str, amax: float, inputs: float) -> None:
        of_weight = pow2_scale(amax, maximum, 0.5)
        codes = cast(fp8[f"{name}.weight"], 1 / of_weight, device)
        fp8[f"{name}.weight"] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        fp8[f"{name}.weight_scale"] = torch.tensor([of_weight])
        scale = pow2_scale(inputs, maximum, 0.25)
        fp8[f"{name}.input_scale"] = torch.tensor([scale])

    for n in (1, 2):
        for e in range(4):
            at = f"model.layers.{n}.mlp.experts.{e}"
            for part in ("gate_proj", "up_proj"):
                quantise(f"{at}.{part}", 0.5 + 0.3 * e, 2.1 * n)
            quantise(f"{at}.down_proj", 0.4 + 0.5 * e, 0.9 + 0.8 * e + 0.1 * n)
    for n in range(3):
        for role in "kv":
            fp8[f"model.layers.{n}.self_attn.{role}_scale"] = torch.tensor(
                [pow2_scale(k_amax(n), maximum, 0.25)]
            )
    config["quantization_config"] = quantization_config(
        ignore=[
            "lm_head",
            "re:.*self_attn.*",
            r"re:.*mlp\.(gate|up|down|gate_up)_proj",
            "re:.*shared_experts.*",
            "re:.*mlp.gate$",
        ]
    )
    monkeypatch.setenv("VLLM_SCALE_ADJUSTMENT", "false")
    other, _, _ = served(write(tmp_path / "fp8", config, fp8), device)
    assert torch.equal(answer.logprobs, other.logprobs)


def test_the_absorbed_weight_is_not_quantised(tmp_path, monkeypatch, quant_config):
    """INC patches kv_b_proj after the worker has absorbed it."""
    config = deepseek_config()
    path = write(tmp_path / "a", config, weights(config))
    nodes = linear_nodes([f"model.layers.{n}.self_attn.kv_b_proj" for n in range(3)])
    allowed = {"types": [], "names": ["kv_b_proj", "latent_cache_k"]}
    quant_config(attention_nodes("mla") | nodes, allowlist=allowed)
    absorbed = []
    for quantised in (True, False):
        if not quantised:
            monkeypatch.delenv("QUANT_CONFIG")
        with engine(path) as llm:
            layer = model_of(llm).model.layers[1].self_attn.mla_attn.mla_attn
            fp8 = layer.kv_b_proj.weight.dtype == torch.float8_e4m3fn
            assert fp8 == quantised
            absorbed.append((layer.W_UK_T.clone(), layer.W_UV.clone()))
    for one, other in zip(*absorbed, strict=True):
        assert torch.equal(one, other)


def test_the_lists_are_part_of_the_key_of_the_compile_cache(tmp_path, quant_config):
    config = llama_config()
    path = write(tmp_path / "a", config, weights(config))
    keys = set()
    for name in ("v_cache_of_none", "k_cache_of_none"):
        blocked = {"types": [], "names": [*KV_ONLY["blocklist"]["names"], name]}
        quant_config(attention_nodes("gqa"), blocklist=blocked)
        with engine(path) as llm:
            keys.add(llm.llm_engine.vllm_config.compute_hash())
    assert len(keys) == 2


def test_quantised_checkpoints_keep_their_weights(tmp_path, quant_config, caplog_vllm):
    config = llama_config()
    config["quantization_config"] = quantization_config(config_groups={})
    path = write(tmp_path / "a", config, weights(config))
    quant_config(attention_nodes("gqa"))
    with engine(path):
        pass
    assert "QUANT_CONFIG gives the scales of the KV cache only" in caplog_vllm.text


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_layer_that_was_not_measured_stops_the_start(tmp_path, quant_config, kind):
    config = BUILDERS[kind]()
    path = write(tmp_path / "a", config, weights(config))
    nodes = attention_nodes(kind)
    left = {name: node for name, node in nodes.items() if ".layers.2." not in name}
    quant_config(left, **KV_ONLY)
    with pytest.raises(ValueError, match=r"layers\.2.*was not measured"), engine(path):
        pass


def test_files_of_another_model_stop_the_start(tmp_path, quant_config):
    config = llama_config(num_hidden_layers=2)
    path = write(tmp_path / "a", config, weights(config))
    quant_config(attention_nodes("gqa"), **KV_ONLY)
    with pytest.raises(ValueError, match="belongs to no attention layer"), engine(path):
        pass
