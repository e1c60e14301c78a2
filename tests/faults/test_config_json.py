# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""config.json and the scales beside it: what no server takes is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import checkpoint, kv_scales, llama_config
from tests.faults.table import Faults, fails, server_refuses

CONFIG = "config.json"
LAYER = "model.layers.1.self_attn"


def text(content: str | bytes):
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / CONFIG).write_bytes(data)


def gone(folder: Path) -> None:
    (folder / CONFIG).unlink()


def folder_in_place(folder: Path) -> None:
    gone(folder)
    (folder / CONFIG).mkdir()


def changed(**values: Any):
    """A builder that sets entries of config.json; None removes one."""

    def build(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text()) | values
        config = {key: value for key, value in config.items() if value is not None}
        (folder / CONFIG).write_text(json.dumps(config))

    return build


def declared(**values: Any):
    """A builder that sets entries of quantization_config."""

    def build(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config["quantization_config"] |= values
        (folder / CONFIG).write_text(json.dumps(config))

    return build


def scheme(**values: Any):
    """A builder that sets entries of kv_cache_scheme."""

    def build(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config["quantization_config"]["kv_cache_scheme"] |= values
        (folder / CONFIG).write_text(json.dumps(config))

    return build


NO_CHECKPOINT = ("no local folder with a config.json", "hf download")
FILES: Faults = {
    "gone": (gone, NO_CHECKPOINT),
    "a folder": (folder_in_place, NO_CHECKPOINT),
    "empty": (text(""), (CONFIG, "no JSON")),
    "cut short": (text('{"model_type": "lla'), (CONFIG, "no JSON")),
    "no UTF-8": (text(b'{"a": "\xff"}'), (CONFIG, "no JSON")),
    "a list": (text("[]"), (CONFIG, "an object")),
    "nested deeply": (text('{"a":' * 100_000), (CONFIG, "nested too deeply")),
    "of nothing": (text("{}"), (CONFIG, "num_hidden_layers")),
    "layers in words": (
        changed(num_hidden_layers="three"),
        (CONFIG, "num_hidden_layers is 'three'"),
    ),
    "no layers": (changed(num_hidden_layers=0), ("num_hidden_layers is 0",)),
    "negative layers": (changed(num_hidden_layers=-3), ("num_hidden_layers is -3",)),
    "a billion layers": (changed(num_hidden_layers=10**9), ("1000000000",)),
    "layers true": (changed(num_hidden_layers=True), ("num_hidden_layers is True",)),
    "heads in words": (changed(num_attention_heads="4"), ("heads is '4'",)),
    "half a KV head": (changed(num_key_value_heads=0.5), ("value_heads is 0.5",)),
    "a latent in words": (changed(kv_lora_rank="64"), ("kv_lora_rank is '64'",)),
    "quantisation in a word": (
        changed(quantization_config="fp8"),
        ("quantization_config is 'fp8'", "object"),
    ),
    "a scheme of 4 bits": (scheme(num_bits=4), ("num_bits is 4", "again")),
    "a dynamic scheme": (scheme(dynamic=True), ("dynamic is True", "auto")),
    "a scheme by group": (scheme(strategy="group"), ("strategy is 'group'",)),
    "a scheme of integers": (scheme(type="int"), ("type is 'int'",)),
    "an asymmetric scheme": (scheme(symmetric=False), ("symmetric is False",)),
    "a scheme in a word": (declared(kv_cache_scheme="fp8"), ("is 'fp8'", "object")),
    "NVFP4 of ModelOpt": (
        declared(kv_cache_scheme=None, kv_cache_quant_algo="NVFP4"),
        ("kv_cache_quant_algo is 'NVFP4'", "auto"),
    ),
    "an unknown flavour": (
        declared(fp8_dtype_flavor="float8_e5m2"),
        ("fp8_dtype_flavor is 'float8_e5m2'", "VLLM_SCALE_ADJUSTMENT"),
    ),
    "a flavour that is a list": (declared(fp8_dtype_flavor=["a"]), ("is ['a']",)),
    "a flavour that is a number": (declared(fp8_dtype_flavor=240), ("is 240",)),
}


@pytest.mark.parametrize("name, fault", FILES.items())
def test_a_config_that_serves_nobody(tmp_path, capfd, name, fault):
    build, parts = fault
    path = checkpoint(tmp_path / "model", "gqa")
    build(Path(path))
    code = 2 if parts is NO_CHECKPOINT else 1
    if code == 1:
        server_refuses(capfd, tmp_path, path, parts=parts)
    words = ("convert", path, tmp_path / "out", "--to", "quark")
    fails(capfd, tmp_path, *words, parts=parts, code=code)


def test_the_environment_says_maybe(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("VLLM_SCALE_ADJUSTMENT", "maybe")
    path = checkpoint(tmp_path / "model", "gqa")
    server_refuses(capfd, tmp_path, path, parts=("VLLM_SCALE_ADJUSTMENT='maybe'",))


def scaled(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The scales of a checkpoint with some of one layer changed; None removes."""
    scales = kv_scales(llama_config())
    for name, tensor in changes.items():
        scales.pop(f"{LAYER}.{name}", None)
        if tensor is not None:
            scales[f"{LAYER}.{name}"] = tensor
    return scales


one = torch.tensor
SCALES = {
    "NaN": (scaled(k_scale=one([torch.nan])), "is nan"),
    "infinite": (scaled(v_scale=one([torch.inf])), "is inf"),
    "zero": (scaled(q_scale=one([0.0])), "is 0.0"),
    "negative": (scaled(k_scale=one([-0.5])), "is -0.5"),
    "subnormal": (scaled(k_scale=one([1e-40])), "subnormal"),
    "1e30": (scaled(v_scale=one([1e30])), "is 1e+30"),
    "whole numbers": (scaled(k_scale=one([1])), "torch.int64"),
    "bytes": (scaled(k_scale=one([1], dtype=torch.uint8)), "torch.uint8"),
    "true": (scaled(k_scale=one([True])), "torch.bool"),
    "complex": (scaled(k_scale=one([1j])), "torch.complex64"),
    "packed FP4": (
        scaled(k_scale=one([1], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
        "float4_e2m1fn_x2",
    ),
    "of no number": (scaled(k_scale=torch.empty(0)), "shape (0,)"),
    "a matrix": (scaled(k_scale=torch.ones(2, 2)), "shape (2, 2)"),
    "for three heads of two": (scaled(k_scale=torch.ones(3)), "3"),
    "gone": (scaled(v_scale=None), "missing_scales"),
    "a zero-point": (scaled(k_zero_point=one([3])), "must be 0"),
}


@pytest.mark.parametrize("case", SCALES)
def test_a_scale_that_is_none(tmp_path, capfd, case):
    scales, said = SCALES[case]
    path = checkpoint(tmp_path / "model", "gqa", scales)
    text = server_refuses(capfd, tmp_path, path, parts=(path, LAYER, said))
    words = ("convert", path, tmp_path / "out", "--to", "quark")
    assert text.removeprefix("error: ") in fails(capfd, tmp_path, *words).err


def test_the_scales_of_a_larger_model(tmp_path, capfd):
    scales = kv_scales(llama_config(num_hidden_layers=5))
    path = checkpoint(tmp_path / "model", "gqa", scales)
    parts = (path, "model.layers.3.self_attn.k_scale", "belongs to no")
    server_refuses(capfd, tmp_path, path, parts=parts)
