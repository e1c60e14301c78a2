# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales in shards that no index names are found from the headers alone."""

import json

import torch
from safetensors.torch import save_file

from vllm.fp8_inc.sources.shards import unlisted_scales

KEY = "model.layers.1.self_attn.k_scale"


def shard(folder, name, *keys):
    save_file({key: torch.ones(1) for key in keys}, folder / name)
    return folder / name


def index(folder, *files, name="model.safetensors.index.json"):
    weight_map = {f"x{n}": file for n, file in enumerate(files)}
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def test_only_scales_of_unlisted_shards_are_yielded(tmp_path):
    index(tmp_path, "a.safetensors")
    shard(tmp_path, "a.safetensors", "model.layers.0.self_attn.k_scale")
    tower = "visual.blocks.1.attn.k_scale"
    path = shard(tmp_path, "b.safetensors", KEY, "lm_head.weight", tower)
    ((file, key, scale),) = unlisted_scales(str(tmp_path))
    assert (file, key, scale.layer, scale.roles) == (path, KEY, "layers.1", ("k",))


def test_a_file_of_any_index_is_listed(tmp_path):
    index(tmp_path, "a.safetensors")
    index(tmp_path, "b.safetensors", name="consolidated.safetensors.index.json")
    shard(tmp_path, "a.safetensors", KEY)
    shard(tmp_path, "b.safetensors", KEY)
    assert not list(unlisted_scales(str(tmp_path)))


def test_without_an_index_every_shard_is_loaded(tmp_path):
    shard(tmp_path, "b.safetensors", KEY)
    assert not list(unlisted_scales(str(tmp_path)))
    assert not list(unlisted_scales("some/model"))


def test_a_broken_file_that_is_not_loaded_is_a_warning(tmp_path, caplog_vllm):
    index(tmp_path, "a.safetensors")
    path = shard(tmp_path, "b.safetensors", KEY)
    path.write_bytes(path.read_bytes()[:20])
    assert not list(unlisted_scales(str(tmp_path)))
    assert str(path) in caplog_vllm.text
