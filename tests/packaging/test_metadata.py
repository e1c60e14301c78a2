# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The wheel's metadata are upstream's with the listed changes."""

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from forkbuild.fork import ForkError


def metadata(build) -> Metadata:
    return Metadata.from_email(build.dist_info_files["METADATA"], validate=True)


def by_extra(parsed: Metadata, extra: str) -> set[str]:
    """The requirements that hold with an extra ("" for none) on this machine."""
    environment = {"extra": extra, "platform_machine": "x86_64"}
    return {
        str(Requirement(f"{r.name}{r.specifier}"))
        for r in parsed.requires_dist
        if r.marker is None or r.marker.evaluate(environment)
    }


def test_cpu_requirements(small_fork):
    parsed = metadata(small_fork.build())
    assert (parsed.name, str(parsed.version)) == ("vllm", "0.28.0+cpu.fp8inc.1")
    core = by_extra(parsed, "")
    assert {"torch==2.13.0", "transformers==5.12.0", "setuptools==77.0.3"} <= core
    assert "numba==0.65.0" in core
    assert not [
        name for name in core if name.startswith(("torchv", "torcha", "torchc"))
    ]
    assert len([name for name in core if name.startswith("torch")]) == 1
    extra = by_extra(parsed, "multimodal") - core
    assert extra == {"torchvision", "torchaudio", "torchcodec>=0.14"}
    assert by_extra(parsed, "bench") - core == {"pandas"}
    assert "pytest==9.2.0" in by_extra(parsed, "test")
    assert {"bench", "multimodal", "test", "lint"} <= set(parsed.provides_extra)


def test_gaudi_pins_neither_torch_nor_numba(small_fork, monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "gaudi")
    core = by_extra(metadata(small_fork.build()), "")
    assert {"torch", "numba", "transformers==5.12.0"} <= core
    assert not {"intel-openmp==2024.2.1", "setuptools==77.0.3"} & core


def test_the_publisher_of_the_base_wheel_gets_no_bug_reports(small_fork):
    text = small_fork.build().dist_info_files["METADATA"].decode()
    assert "body" not in text and "publisher" not in text
    assert text.count("License-File:") == 2


def test_entry_points_are_added(small_fork):
    text = small_fork.build().dist_info_files["entry_points.txt"].decode()
    assert "vllm = vllm.main:main\n" in text
    _, _, plugins = text.partition("[vllm.general_plugins]\n")
    assert plugins.split("\n")[:2] == [
        "resolver = vllm.resolver:register",
        "fp8_inc = vllm.fp8_inc.plugin:register",
    ]


@pytest.mark.parametrize("name", ["gone", "pandas"])  # pandas: only in an extra
def test_a_change_to_what_upstream_does_not_require_is_an_error(name, small_fork):
    pyproject = small_fork.root / "pyproject.toml"
    table = "[tool.fork.replace]"
    text = pyproject.read_text().replace(table, f"{table}\n{name} = []")
    pyproject.write_text(text)
    with pytest.raises(ForkError, match=f"does not require {name}"):
        _ = small_fork.build().dist_info_files
