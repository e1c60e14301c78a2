# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Shards and indices that are broken: one error that names the file, nothing written.

Each is looked at by `inspect`, `convert` and the check that a server makes before it
starts a process.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.checkpoints import checkpoint
from tests.faults.shards import INDEX, NAME, content, cut, entry, index, raw
from tests.faults.table import Faults, fails, server_refuses
from vllm.fp8_inc.early_checks import shards_of

AGAIN = ("download",)
KEY = "model.layers.1.self_attn.k_scale"


def folder_in_place(folder: Path) -> None:
    (folder / NAME).unlink()
    (folder / NAME).mkdir()


def dangling(folder: Path) -> None:
    (folder / NAME).unlink()
    (folder / NAME).symlink_to(folder / "blobs" / "gone")


def loop(folder: Path) -> None:
    (folder / NAME).unlink()
    (folder / NAME).symlink_to(folder / NAME)


def second(size: int):
    """A second shard, cut short, of a checkpoint without an index."""

    def build(folder: Path) -> None:
        path = folder / "z.safetensors"
        save_file({"x": torch.zeros(64)}, path)
        path.write_bytes(path.read_bytes()[:size])

    return build


BIG = "header too large"
SHARDS: Faults = {
    "data cut short": (cut(-100), (NAME, *AGAIN)),
    "one byte missing": (cut(-1), (NAME, *AGAIN)),
    "header cut short": (cut(50), (NAME, *AGAIN)),
    "length cut short": (cut(5), (NAME, *AGAIN)),
    "empty": (cut(0), (NAME, *AGAIN)),
    "a byte too many": (raw({"a": entry()}, bytes(5)), (NAME, *AGAIN)),
    "header length of 2**64 - 1": (raw({}, length=2**64 - 1), (NAME, BIG)),
    "header length beyond the file": (raw({}, length=4096), (NAME, *AGAIN)),
    "header length 0": (raw(b"", length=0), (NAME, *AGAIN)),
    "header no JSON": (raw(b"{'a': 1}"), (NAME, "JSON")),
    "header no UTF-8": (raw(b'{"\xff\xfe": 1}'), (NAME, *AGAIN)),
    "header a list": (raw([]), (NAME, *AGAIN)),
    "header nested deeply": (raw(b'{"a":' * 100_000), (NAME, *AGAIN)),
    "offsets overlap": (
        raw({"a": entry(), "b": entry(), "c": entry(offsets=(4, 8))}),
        (NAME, "offset"),
    ),
    "offsets leave a hole": (raw({"a": entry(offsets=(4, 8))}), (NAME, "offset")),
    "offsets beyond the end": (
        raw({"a": entry(shape=(4,), offsets=(0, 16))}),
        (NAME, *AGAIN),
    ),
    "offsets backwards": (raw({"a": entry(offsets=(8, 4))}), (NAME, *AGAIN)),
    "a negative offset": (raw({"a": entry(offsets=(-4, 0))}), (NAME, "-4")),
    "a shape of another size": (
        raw({"a": entry(shape=(3,), offsets=(0, 8))}),
        (NAME, "shape"),
    ),
    "a shape that overflows": (
        raw({"a": entry(shape=(2**62, 8), offsets=(0, 8))}),
        (NAME, "overflow"),
    ),
    "an unknown dtype": (raw({"a": entry("Q9", (2,), (0, 8))}), (NAME, "Q9")),
    "a tensor without offsets": (raw({"a": {"dtype": "F32"}}), (NAME, *AGAIN)),
    "a key twice, unequal": (
        raw(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
        ),
        (NAME, *AGAIN),
    ),
    "metadata that are no text": (
        raw({"__metadata__": {"a": 3}, "a": entry(shape=(2,), offsets=(0, 8))}),
        (NAME, *AGAIN),
    ),
    "a pointer of Git LFS": (
        content(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        (NAME, *AGAIN),
    ),
    "a web page": (content(b"<!DOCTYPE html><html>404</html>"), (NAME, *AGAIN)),
    "a pickle": (content(b"\x80\x04cos\nsystem\n(S'true'\ntR."), (NAME, *AGAIN)),
    "a folder": (folder_in_place, (NAME, *AGAIN)),
    "a dangling link": (dangling, (NAME, *AGAIN)),
    "a link to itself": (loop, (NAME, *AGAIN)),
    "another shard cut short": (second(60), ("z.safetensors", *AGAIN)),
}
INDICES: Faults = {
    "a missing shard": (
        index({"a": NAME, "b": "model-2.safetensors"}),
        (INDEX, "model-2.safetensors", *AGAIN),
    ),
    "a shard outside the folder": (
        index({"a": NAME, "b": "../outside.safetensors"}),
        (INDEX, "../outside.safetensors"),
    ),
    "no JSON": (content(b'{"weight_map": ', INDEX), (INDEX, *AGAIN)),
    "empty": (content(b"", INDEX), (INDEX, *AGAIN)),
    "no UTF-8": (content(b'{"\xff": 1}', INDEX), (INDEX, *AGAIN)),
    "a list": (content(b"[]", INDEX), (INDEX, "weight_map")),
    "no weight_map": (content(b'{"a": {}}', INDEX), (INDEX, "weight_map")),
    "a weight_map that is a list": (index([[1, 2]]), (INDEX, "file name")),
    "a file name that is a number": (index({"a": 3}), (INDEX, "file name")),
    "nested deeply": (content(b"[" * 100_000, INDEX), (INDEX, "nested")),
}


def spoiled(tmp_path: Path, build) -> str:
    path = checkpoint(tmp_path / "model", "gqa")
    build(Path(path))
    return path


@pytest.mark.parametrize("name, fault", [*SHARDS.items(), *INDICES.items()])
def test_a_broken_file_is_named_and_nothing_is_written(tmp_path, capfd, name, fault):
    build, parts = fault
    path = spoiled(tmp_path, build)
    server_refuses(capfd, tmp_path, path, parts=parts)
    words = ("convert", path, tmp_path / "out", "--to", "quark")
    fails(capfd, tmp_path, *words, parts=parts)
    with pytest.raises(ValueError) as error:
        _ = shards_of(
            SimpleNamespace(model=path), SimpleNamespace(load_format="auto")
        ).keys
    assert all(part in str(error.value) for part in parts)


def test_a_scale_in_a_dtype_that_torch_lacks_is_named(tmp_path, capfd):
    names = {KEY: entry("F6_E2M3", (4,), (0, 3)), "a": entry("U8", (1,), (3, 4))}
    path = spoiled(tmp_path, raw(names, bytes(4)))
    server_refuses(capfd, tmp_path, path, parts=(NAME, "F6_E2M3"))


def test_pickled_weights_are_not_read(tmp_path, capfd):
    path = checkpoint(tmp_path / "model", "gqa")
    (Path(path) / NAME).rename(Path(path) / "pytorch_model.bin")
    server_refuses(capfd, tmp_path, path, parts=(path, "pickled", "Convert"))


def split(tmp_path: Path) -> Path:
    """A checkpoint whose scales are in a shard of their own, with an index."""
    folder = Path(checkpoint(tmp_path / "model", "gqa"))
    tensors = load_file(folder / NAME)
    scales = {key: tensors.pop(key) for key in list(tensors) if "_scale" in key}
    save_file(tensors, folder / NAME, metadata={"format": "pt"})
    save_file(scales, folder / "scales.safetensors", metadata={"format": "pt"})
    names = dict.fromkeys(tensors, NAME) | dict.fromkeys(scales, "scales.safetensors")
    index(names)(folder)
    return folder


def lies(folder: Path) -> None:
    """The index promises scales that the shard lacks."""
    path = folder / "scales.safetensors"
    tensors = load_file(path)
    del tensors[KEY]
    save_file(tensors, path, metadata={"format": "pt"})


def unlisted(folder: Path) -> None:
    with safe_open(folder / NAME, framework="pt") as shard:
        index(dict.fromkeys(shard.keys(), NAME))(folder)


def twice(folder: Path) -> None:
    """A shard that is out of date holds the scale too."""
    old = {KEY: torch.tensor([0.5])}
    save_file(old, folder / "old.safetensors", metadata={"format": "pt"})
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    index(names | {"x": "old.safetensors"})(folder)


SPLIT: Faults = {
    "an index that lies": (lies, (KEY, "missing_scales")),
    "an index without the scales": (unlisted, ("scales.safetensors", "does not name")),
    "a key in two shards": (twice, (KEY, "old.safetensors", "remove the shard")),
}


@pytest.mark.parametrize("name, fault", SPLIT.items())
def test_shards_that_contradict_each_other(tmp_path, capfd, name, fault):
    build, parts = fault
    folder = split(tmp_path)
    assert call_is_fine(capfd, folder)
    build(folder)
    server_refuses(capfd, tmp_path, folder, parts=parts)
    words = ("convert", folder, tmp_path / "out", "--to", "modelopt")
    fails(capfd, tmp_path, *words, parts=parts)


def call_is_fine(capfd, folder: Path) -> bool:
    from tests.kv_scales.command import call

    return call(capfd, "inspect", folder).code == 0
