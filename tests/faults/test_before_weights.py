# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What can be known without weights stops a real engine before they are loaded."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.checkpoints import checkpoint, deepseek_config, kv_scales
from tests.engines import engine
from tests.faults.shards import INDEX, NAME, cut, index
from vllm.fp8_inc.early_checks import check_configuration
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

LAYER = "model.layers.1.self_attn"


@pytest.fixture
def read(monkeypatch):
    """The calls that read weights; a start that fails early makes none."""
    calls: list[str] = []
    iterate = DefaultModelLoader._get_weights_iterator

    def counted(self, source):
        calls.append(source.model_or_path)
        return iterate(self, source)

    monkeypatch.setattr(DefaultModelLoader, "_get_weights_iterator", counted)
    return calls


def with_scale(folder: Path, tensor: torch.Tensor) -> str:
    scales = kv_scales(deepseek_config()) | {f"{LAYER}.k_scale": tensor}
    return checkpoint(folder, "mla", scales)


def refused(path: str, part: str, **options) -> None:
    with pytest.raises(ValueError) as error, engine(path, **options):
        pass
    assert part in str(error.value)


def test_the_count_counts(tmp_path, read):
    with engine(checkpoint(tmp_path, "mla")):
        pass
    assert read == [str(tmp_path)]


def test_scales_are_read_before_weights(tmp_path, read):
    refused(with_scale(tmp_path, torch.tensor([torch.nan])), f"{LAYER}.k_scale is nan")
    assert not read


@pytest.mark.parametrize(
    "build, part",
    [(cut(-1), NAME), (index({"a": NAME, "b": "other.safetensors"}), INDEX)],
)
def test_headers_are_read_before_a_model_is_built(tmp_path, read, build, part):
    path = checkpoint(tmp_path, "mla")
    build(tmp_path)
    refused(path, str(tmp_path / part))
    assert not read


def configuration(folder: Path, fp8_inc: object, **quantization):
    """What the check looks at of a VllmConfig."""
    path = checkpoint(folder, "mla", **quantization)
    content = json.loads((folder / "config.json").read_text())
    hf = SimpleNamespace(
        quantization_config=content["quantization_config"], model_type="deepseek_v2"
    )
    return SimpleNamespace(
        additional_config={"fp8_inc": fp8_inc},
        model_config=SimpleNamespace(model=path, hf_config=hf),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        load_config=SimpleNamespace(load_format="auto"),
    )


@pytest.mark.parametrize(
    "fp8_inc, quantization, parts",
    [
        ({"device": "gaudi4"}, {}, ["device is 'gaudi4'", "'gaudi2' or 'gaudi3'"]),
        ({"device": None}, {}, ["device is None"]),
        ({"devise": "gaudi2"}, {}, ["devise is 'gaudi2'"]),
        ({"missing_scales": "maybe"}, {}, ["missing_scales is 'maybe'"]),
        ({"hpu_matmul": "fp4"}, {}, ["hpu_matmul is 'fp4'"]),
        ("gaudi2", {}, ["fp8_inc is 'gaudi2'"]),
        (["gaudi2"], {}, ["fp8_inc is ['gaudi2']"]),
        ({"legacy_scales": ""}, {}, ["legacy_scales is ''"]),
        ({"legacy_scales": "/nowhere.json"}, {}, ["/nowhere.json cannot be read"]),
        ({"legacy_scales": "/dev/zero"}, {}, ["/dev/zero cannot be read", "regular"]),
        ({"legacy_scales": "/proc"}, {}, ["/proc cannot be read", "directory"]),
        ({}, {"fp8_dtype_flavor": "e5m2"}, ["fp8_dtype_flavor is 'e5m2'"]),
        ({}, {"kv_cache_scheme": {"num_bits": 4}}, ["num_bits is 4"]),
    ],
    ids=str,
)
def test_options_and_config_are_checked_before_a_process_is_started(
    tmp_path, fp8_inc, quantization, parts
):
    config = configuration(tmp_path, fp8_inc, **quantization)
    with pytest.raises(ValueError) as error:
        check_configuration(config, None)
    for part in parts:
        assert part in str(error.value)


def test_the_environment_is_checked_too(tmp_path, monkeypatch):
    config = configuration(tmp_path, {})
    check_configuration(config, None)
    monkeypatch.setenv("VLLM_SCALE_ADJUSTMENT", "maybe")
    with pytest.raises(ValueError, match="VLLM_SCALE_ADJUSTMENT='maybe'"):
        check_configuration(config, None)
    check_configuration(config, "quant.json")  # whose scales are made for the device


def test_what_is_not_local_is_left_to_the_load(tmp_path):
    config = configuration(tmp_path, {})
    config.model_config.model = "nobody/nothing"
    check_configuration(config, None)
