# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Every layout's modules become layers and roles; the lists decide which layers."""

import pytest

from tests.sources.inc.helpers import (
    SAMPLES,
    measured,
    mha,
    mla,
    read,
    values,
    write_file,
)
from vllm.fp8_inc.sources.inc.files import read_nodes
from vllm.fp8_inc.sources.inc.nodes import (
    ATTENTION_NODES,
    match_attention,
    match_expert,
    type_of,
)

MHA_AT = "model.layers.7.self_attn.attn.impl."
FORK_2025 = "model.layers.7.self_attn.mla_attn.impl."
GAUDI = "model.layers.7.self_attn.mla_attn.mla_attn."


@pytest.mark.parametrize(
    "path, inputs",
    [
        (MHA_AT + "k_cache", ("k",)),
        (MHA_AT + "v_cache", ("v",)),
        ("model.layers.7.self_attn.attn.impl.key_cache", ("k",)),
        ("model.layers.7.self_attn.attn.impl.value_cache", ("v",)),
        ("model.layers.7.self_attn.attn.impl.qk_matmul", ("decode", None)),
        ("model.layers.7.self_attn.attn.impl.kv_matmul", ("prob", None)),
        ("model.layers.7.self_attn.attn.k_cache", ("k",)),
        (f"language_model.{MHA_AT}k_cache", ("k",)),
        ("language_model.model.layers.7.self_attn.attn.impl.matmul_av", ("prob", None)),
        ("model.layers.7.attn.attn.impl.v_cache", ("v",)),
        ("model.language_model.layers.7.self_attn.attn.impl.v_cache", ("v",)),
        (FORK_2025 + "latent_cache_k", ("latent",)),
        (FORK_2025 + "latent_cache_k_nodeq", ("latent",)),
        (FORK_2025 + "latent_cache_v", ("latent",)),
        (GAUDI + "impl.latent_cache_k", ("latent",)),
        (GAUDI + "latent_cache_k", ("latent",)),
        (GAUDI + "impl.matmul_qk", ("decode", None)),
        (
            GAUDI + "impl.fused_scaled_dot_product_attention",
            ("q", None, None, "prob"),
        ),
        (
            "model.layers.7.mtp_block.self_attn.mla_attn.impl.latent_cache_k",
            ("latent",),
        ),
    ],
)
def test_every_layout(path, inputs):
    found = match_attention(path)
    assert (found.layer, found.node.inputs) == ("layers.7", inputs)


@pytest.mark.parametrize(
    "path, layer",
    [
        ("vision_model.encoder.layers.7.self_attn.attn.impl.k_cache", "none"),
        ("model.blocks_of_mine.7.cross.k_cache", "none"),
        ("model.layers.7.self_attn.qkv_proj", None),
        ("model.layers.7.self_attn.attn.impl.batch2block_matmul", None),
        ("lm_head", None),
    ],
)
def test_what_is_no_attention_of_the_model(path, layer):
    found = match_attention(path)
    assert (found is None) == (layer is None)
    assert found is None or found.layer is None


def test_classes_are_vllm_gaudis():
    from tests.sources.inc.inc_oracle import MODULE_TYPES

    known = {type_of(name) for name in ATTENTION_NODES}
    paths = [
        path
        for file in SAMPLES.glob("*/*maxabs*_?_?.json")
        for path in read_nodes(
            file, "Scale" if "MAXABS" in file.name else "DynamicRange"
        )
    ]
    assert len(paths) > 300
    known |= {type_of(path) for path in paths}
    assert known <= MODULE_TYPES.keys()  # None is not in it: every path has a class
    assert len(known) > 10


def test_an_expert():
    path = "language_model.model.layers.1.mlp.experts.routed_experts.moe_op.w2_list.13"
    found = match_expert(path)
    assert (found.moe, found.weights, found.index) == (path[:-11], "w2_list", 13)
    assert type_of(path) == "MoeMatmul"
    assert match_expert(path[:-3]) is None


def test_roles_of_mha(tmp_path):
    write_file(tmp_path, mha(0, 3.0, 0.5, q=100.0, decode=13.0))
    (layer,) = read(tmp_path).attention.values()
    assert {
        role: (s.key.rpartition(".")[2], s.dequant_scale) for role, s in layer.items()
    } == {
        "k": ("k_cache", 2.0**-5),
        "v": ("v_cache", 2.0**-7),
        "q": ("fused_scaled_dot_product_attention", 1.0),
        "q_decode": ("matmul_qk", 2.0**-3),
        "prob": ("matmul_av", 2.0**-6),
    }


@pytest.mark.parametrize(
    "at", ["mla_attn.impl", "mla_attn.mla_attn.impl", "mla_attn.mla_attn"]
)
def test_roles_of_mla(tmp_path, at):
    """One latent for k and v; the absorbed query is not the expanded one."""
    nodes = mla(0, 28.0, q=100.0, decode=1.5, at=at)
    nodes[f"model.layers.0.self_attn.{at}.k_cache"] = measured(900.0)  # unused there
    write_file(tmp_path, nodes)
    (layer,) = read(tmp_path).attention.values()
    assert {
        role: (s.key.rpartition(".")[2], s.dequant_scale) for role, s in layer.items()
    } == {
        "k": ("latent_cache_k", 2.0**-2),
        "v": ("latent_cache_k", 2.0**-2),
        "q": ("fused_scaled_dot_product_attention", 1.0),
        "q_latent": ("matmul_qk", 2.0**-6),
        "prob": ("matmul_av", 2.0**-6),
    }


def test_of_two_caches_of_one_latent_the_larger_counts(tmp_path):
    at = "model.layers.0.self_attn.mla_attn.impl."
    write_file(
        tmp_path,
        mla(0, 3.0, at="mla_attn.impl") | {at + "latent_cache_k_nodeq": measured(28.0)},
    )
    layer = read(tmp_path).attention["layers.0"]
    assert layer["k"] == layer["v"]
    assert (layer["k"].key, layer["k"].dequant_scale) == (
        at + "latent_cache_k_nodeq",
        0.25,
    )


@pytest.mark.parametrize(
    "folder, prefix, device, size, layers, kind",
    [
        ("mha_fork2025_llama31_g3_boundary", "inc_output", "gaudi3", 8, [0, 16], "MHA"),
        ("mha_gaudi2026_llama33_g3", "inc_output", "gaudi3", 2, [0, 1], "MHA"),
        (
            "mla_fork2025_dsr1_g2_unprocessed",
            "inc_measure_output",
            "gaudi2",
            16,
            [0, 3],
            "MLA",
        ),
        ("mla_fork2025_dsr1_g3", "inc_output", "gaudi3", 8, [0, 3], "MLA"),
        ("moe_fork2025_qwen3_g2", "inc_measure_output", "gaudi2", 4, None, "MHA"),
        ("moe_gaudi2026_llama4_g3", "inc_output", "gaudi3", 8, [0, 1], "MHA"),
        ("tiny_mha_g2_inc310", "inc_output", "gaudi2", 1, [0, 1], "MHA"),
        ("tiny_mha_g3_inc310", "inc_output", "gaudi3", 1, [0, 1], "MHA"),
        ("tiny_mla_g2_inc310", "inc_output", "gaudi2", 1, [0, 1], "MLA"),
        ("tiny_mla_g3_inc310", "inc_output", "gaudi3", 1, [0, 1], "MLA"),
    ],
)
def test_every_sample_gives_every_role(
    tmp_path, folder, prefix, device, size, layers, kind
):
    found = read(
        tmp_path, device, 0, size, dump_stats_path=f"{SAMPLES}/{folder}/{prefix}"
    )
    assert len(found.attention) == 2 and not found.excluded
    if layers:
        assert list(found.attention) == [f"layers.{n}" for n in layers]
    decode = "q_latent" if kind == "MLA" else "q_decode"
    for layer in found.attention.values():
        assert layer.keys() == {"k", "v", "q", decode, "prob"}
        assert (layer["k"].key == layer["v"].key) == (kind == "MLA")


def test_blocked_layers_keep_their_cache(tmp_path):
    write_file(tmp_path, mha(0, 3.0, 0.5) | mha(1, 30.0, 0.25) | mha(11, 7.0, 2.0))
    found = read(
        tmp_path, blocklist={"names": ["layers\\.1\\..*_cache", "layers\\.11\\."]}
    )
    assert list(found.attention) == ["layers.0"]
    assert found.excluded == {"layers.1", "layers.11"}
    found = read(tmp_path, allowlist={"names": ["layers\\.1\\."]})
    assert list(found.attention) == ["layers.1"]
    found = read(tmp_path, blocklist={"types": ["VLLMKVCache"]})
    assert not found.attention and len(found.excluded) == 3


def test_a_blocked_matmul_gives_no_query(tmp_path):
    write_file(tmp_path, mha(0, 3.0, 0.5))
    found = read(tmp_path, blocklist={"names": ["matmul_qk", "matmul_av"]})
    assert found.attention["layers.0"].keys() == {"k", "v", "q", "prob"}
    found = read(tmp_path, blocklist={"types": ["Matmul", "ModuleFusedSDPA"]})
    assert found.attention["layers.0"].keys() == {"k", "v"}


def test_k_and_v_are_not_parted(tmp_path):
    write_file(tmp_path, mha(4, 3.0, 0.5))
    with pytest.raises(ValueError) as error:
        read(tmp_path, blocklist={"names": ["v_cache"]})
    for part in ("layers.4", "k_cache", "v_cache", "list both or neither"):
        assert part in str(error.value)


@pytest.mark.parametrize("is_mla", [False, True])
def test_a_layer_that_was_not_calibrated_is_asked_by_name(tmp_path, is_mla):
    """Calibrated with the blocklist it is served with, no file knows the layer."""
    write_file(tmp_path, {"model.layers.0.mlp.down_proj": measured(1.0, weight=0.5)})
    found = read(tmp_path, blocklist={"names": ["layers\\.1\\.self_attn"]})
    assert not found.attention and not found.excluded
    name = "self_attn.mla_attn.mla_attn" if is_mla else "self_attn.attn"
    assert found.quantises_cache(f"model.layers.0.{name}", is_mla)
    assert not found.quantises_cache(f"model.layers.1.{name}", is_mla)
    if not is_mla:
        found = read(tmp_path, blocklist={"names": ["k_cache"]})
        with pytest.raises(ValueError, match="k_cache from .*v_cache.*both or neither"):
            found.quantises_cache("model.layers.0.self_attn.attn", False)


def test_a_layer_without_measurements_of_its_cache(tmp_path):
    nodes = {p: n for p, n in mha(3, 3.0, 0.5).items() if "cache" not in p}
    write_file(tmp_path, nodes | mha(4, 1.0, 1.0))
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    for part in ("layers.3", "was not measured", "ignore_modules_wo_measures"):
        assert part in str(error.value)
    found = read(tmp_path, ignore_modules_wo_measures="true")
    assert (list(found.attention), found.excluded) == (["layers.4"], {"layers.3"})
    assert read(tmp_path, blocklist={"types": ["VLLMKVCache"]}).excluded == {
        "layers.3",
        "layers.4",
    }


@pytest.mark.parametrize("method", ["maxabs_hw", "maxabs_pow2"])
def test_a_cache_that_was_never_visited(tmp_path, method):
    write_file(tmp_path, mha(3, 0.0, 0.5))
    with pytest.raises(ValueError) as error:
        read(tmp_path, scale_method=method)
    assert "layers.3.self_attn.attn.impl.k_cache was never visited" in str(error.value)


def test_caches_of_nobody_are_named(tmp_path, caplog_vllm):
    write_file(
        tmp_path,
        mha(0, 3.0, 0.5)
        | {"vision_tower.layers.0.self_attn.attn.impl.k_cache": measured(1.0)},
    )
    assert list(read(tmp_path).attention) == ["layers.0"]
    (text,) = [r.getMessage() for r in caplog_vllm.records]
    assert "1 caches are in no attention layer" in text and "vision_tower" in text


def test_a_mixture_of_methods(tmp_path):
    write_file(tmp_path, mha(0, 57.0, 57.0) | mha(1, 57.0, 57.0))
    rules = {
        "default": {
            part: {"rounding_method": "IDENTITY", "backoff": 0.25}
            for part in ("weight", "activation")
        },
        "layers": {"1": {"activation": {"backoff": 1.0}}},
    }
    found = read(tmp_path, scale_method=rules)
    assert values(found, "layers.0")["k"] == 0.5078125
    assert values(found, "layers.1")["k"] == 0.126953125
