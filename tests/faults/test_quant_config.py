# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""QUANT_CONFIG, INC's files and the legacy JSON that are broken in the file system.

What is wrong in their content has tables of its own: tests/sources.
"""

import json
import os
from pathlib import Path

import pytest

from tests.checkpoints import checkpoint, llama_config, weights, write
from tests.faults.table import Faults, fails, server_refuses
from tests.sources.inc.helpers import mha, write_config, write_file

NAME = "quant.json"
MEASURED = "inc_output_hooks_maxabs.json"


def good(folder: Path) -> Path:
    """A QUANT_CONFIG with measurements of three layers."""
    write_file(folder, mha(0, 3.0, 0.5) | mha(1, 3.0, 0.5) | mha(2, 3.0, 0.5))
    return Path(write_config(folder))


def text(content: str | bytes, name: str = NAME):
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def keys(**values: object):
    return lambda folder: write_config(folder, **values)


def special(make, name: str = NAME):
    """A builder that puts something else in the place of a file."""

    def build(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return build


def huge(path: Path) -> None:
    """Two GiB that take no room."""
    path.touch()
    os.truncate(path, 2 << 30)


def renamed(to: str):
    return lambda folder: (folder / MEASURED).rename(folder / to)


def layers(number: int):
    """A builder of measurements of so many layers."""

    def build(folder: Path) -> None:
        nodes: dict = {}
        for n in range(number):
            nodes |= mha(n, 3.0, 0.5)
        write_file(folder, nodes)

    return build


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


DEEP = '{"mode":' + "[" * 900 + "]" * 900 + "}"
CONFIGS: Faults = {
    "empty": (text(""), (NAME, "no JSON")),
    "a list": (text("[]"), (NAME, "the file is []")),
    "cut short": (text('{"mode": "QUANT'), (NAME, "no JSON")),
    "no UTF-8": (text(b'{"mode": "\xff"}'), (NAME, "no JSON")),
    "nested deeply": (text("[" * 100_000), (NAME, "nested too deeply")),
    "a value nested deeply": (text(DEEP), (NAME, "mode is [[[[[...")),
    "a long value": (text(json.dumps({"mode": "Q" * 10**6})), (NAME, "mode is 'QQ")),
    "measures": (keys(mode="MEASURE"), (NAME, '"MEASURE" calibrates')),
    "of a device that there is not": (
        keys(device_for_scales="GAUDI4"),
        (NAME, "device_for_scales is 'GAUDI4'"),
    ),
    "an unknown method": (keys(scale_method="best"), (NAME, "best")),
    "huge": (special(huge), (NAME, "2,147,483,648 bytes")),
    "a pipe": (special(os.mkfifo), (NAME,)),
    "a link to itself": (special(lambda p: p.symlink_to(p)), (NAME,)),
    "measurements gone": (renamed("elsewhere.json"), (NAME, "dump_stats_path")),
    "one rank of two": (
        renamed("inc_output_hooks_maxabs_1_2.json"),
        ("maxabs_0_2.json is missing", "copy the files of all ranks"),
    ),
    "pickled measurements": (
        renamed("inc_output_hooks_maxabs.npz"),
        ("without its JSON", "not read"),
    ),
    "of a smaller model": (layers(2), (MEASURED, "layers.2", "was not measured")),
    "of a larger model": (layers(5), (MEASURED, "layers.3", "belongs to no")),
    "measurements empty": (text("", MEASURED), (MEASURED, "alibrate again")),
    "measurements cut short": (
        text('{"Mode": "DynamicRange", "Nodes": {', MEASURED),
        (MEASURED, "alibrate again"),
    ),
    "measurements no UTF-8": (text(b"\xff", MEASURED), (MEASURED, "alibrate again")),
    "measurements huge": (special(huge, MEASURED), (MEASURED, "2,147,483,648")),
    "measurements a pipe": (special(os.mkfifo, MEASURED), (MEASURED, "regular file")),
    "measurements endless": (special(endless, MEASURED), (MEASURED, "regular file")),
    "measurements a folder": (special(Path.mkdir, MEASURED), (MEASURED, "directory")),
}


@pytest.mark.parametrize("name, fault", CONFIGS.items())
def test_quant_config_names_what_is_wrong(tmp_path, capfd, name, fault):
    build, parts = fault
    config = llama_config()
    model = write(tmp_path / "model", config, weights(config))
    path = good(tmp_path)
    build(tmp_path)
    # A link or a pipe is no file to `inspect`: wrong usage, before it is read.
    wrong = name in ("a pipe", "a link to itself")
    if wrong:
        words = ("inspect", path, "--model", model)
        fails(capfd, tmp_path, *words, parts=parts, code=2)
    else:
        server_refuses(capfd, tmp_path, path, "--model", model, parts=parts)
    words = ("convert", path, tmp_path / "out", "--to", "quark", "--model", model)
    if not name.endswith("er model"):
        fails(capfd, tmp_path, *words, parts=parts, code=2 if wrong else 1)


@pytest.mark.parametrize("name", ["a pipe", "huge", "a link to itself"])
def test_a_server_reads_no_pipe_and_nothing_huge(tmp_path, name):
    from vllm.fp8_inc.sources.inc.config_file import read_config

    path = good(tmp_path)
    CONFIGS[name][0](tmp_path)
    with pytest.raises(ValueError, match=f"QUANT_CONFIG: {path} cannot be read"):
        read_config(str(path))


LEGACY = "scales.json"
LEGACIES: Faults = {
    "huge": (special(huge, LEGACY), (LEGACY, "2,147,483,648 bytes")),
    "nested deeply": (text("[" * 100_000, LEGACY), (LEGACY, "nested too deeply")),
    "many wrong entries": (
        text(json.dumps({"kv_cache": {str(n): n for n in range(1000)}}), LEGACY),
        (LEGACY, "kv_cache.dtype", "more"),
    ),
    "of a smaller model": (
        text(
            json.dumps(
                {
                    "kv_cache": {
                        "dtype": "float8_e4m3fn",
                        "scaling_factor": {"0": {"0": 0.5, "1": 0.5}},
                    }
                }
            ),
            LEGACY,
        ),
        (LEGACY, "kv_cache.scaling_factor.*.2"),
    ),
    "of a larger model": (
        text(
            json.dumps(
                {
                    "kv_cache": {
                        "dtype": "float8_e4m3fn",
                        "scaling_factor": {"0": {str(n): 0.5 for n in range(5)}},
                    }
                }
            ),
            LEGACY,
        ),
        (LEGACY, "scaling_factor.*.3", "belongs to no"),
    ),
}


@pytest.mark.parametrize("name, fault", LEGACIES.items())
def test_a_legacy_json_names_what_is_wrong(tmp_path, capfd, name, fault):
    build, parts = fault
    config = llama_config()
    model = write(tmp_path / "model", config, weights(config))
    (tmp_path / LEGACY).write_text('{"kv_cache": {}}')
    build(tmp_path)
    words = (tmp_path / LEGACY, "--model", model)
    server_refuses(capfd, tmp_path, *words, parts=parts)


def test_the_files_do_not_lead_elsewhere(tmp_path, capfd):
    """dump_stats_path is what the user named; an index names no other folder."""
    outside = tmp_path / "outside"
    model = Path(checkpoint(tmp_path / "model", "gqa"))
    (model / "model.safetensors").rename(outside.with_suffix(".safetensors"))
    names = {"weight_map": {"a": "../outside.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(names))
    server_refuses(capfd, tmp_path, model, parts=("no *.safetensors",))
