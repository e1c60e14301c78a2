# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What can rot in the Dockerfile and in docs/images.md.

The images themselves are built by tools/image.py.
"""

import functools
import json
import os
import re
import shlex
from pathlib import Path

import pytest

import image
import patches
from forkbuild.fork import Fork
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.fp8_inc import adjustment, environment, quant_config
from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).resolve().parents[2]
FORK = Fork(ROOT)
TEXT = (ROOT / "Dockerfile").read_text("utf-8")
DOCS = (ROOT / "docs" / "images.md").read_text("utf-8")

# Variable -> where it is read, for those that are not this fork's.
READ_BY_OTHERS = {
    "HABANA_VISIBLE_DEVICES": "habana-container-runtime",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "Open MPI",
    "PT_HPU_LAZY_MODE": "habana_frameworks.torch",
    "VLLM_CONTIGUOUS_PA": "vllm_gaudi",
    "VLLM_CPU_KVCACHE_SPACE": "vllm",
    "VLLM_SKIP_WARMUP": "vllm_gaudi",
}
TOGGLES = {
    "PT_HPU_LAZY_MODE",
    "--enforce-eager",
    "VLLM_SKIP_WARMUP",
    "VLLM_CONTIGUOUS_PA",
    adjustment.ENV,
    quant_config.ENV,
}


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, rest in pairs]


def stage(name: str) -> list[tuple[str, str]]:
    """The instructions of one stage."""
    found, inside = [], False
    for word, rest in instructions():
        if word == "FROM":
            inside = rest.endswith(f" AS {name}")
        elif inside:
            found.append((word, rest))
    assert found, f"no stage {name}"
    return found


def values(name: str, word: str) -> list[str]:
    """What follows an instruction, wherever a stage has it."""
    return [rest for found, rest in stage(name) if found == word]


def copied() -> list[str]:
    """The paths that the Dockerfile copies from the checkout."""
    rows = [rest.split() for word, rest in instructions() if word == "COPY"]
    return [path for row in rows if "--from" not in row[0] for path in row[:-1]]


@functools.cache
def parser() -> FlexibleArgumentParser:
    """The server's own command line."""
    return make_arg_parser(FlexibleArgumentParser())


def docker_runs() -> list[list[str]]:
    """The `docker run` lines of the document, as words."""
    joined = DOCS.replace("\\\n", " ")
    return [
        shlex.split(line) for line in re.findall(r"^ +docker run .*$", joined, re.M)
    ]


def test_every_run_has_shared_memory_for_vllms_processes():
    """160 MiB at the least, where a container has 64 MB unless it is told."""
    for words in docker_runs():
        assert {"--shm-size", "--ipc=host"} & set(words), words


def test_every_copied_path_exists_and_passes_the_ignore_file():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*", "a list of what may leave the checkout"
    allowed = [line[1:] for line in patterns if line.startswith("!")]
    assert sorted(allowed) == sorted(set(copied()))
    for path in copied():
        assert (ROOT / path).exists(), path


def test_the_wheel_can_be_built_from_what_is_copied():
    needed = ["pyproject.toml", "upstream.toml", "NOTICE", "patches/vllm/series"]
    needed += ["tools/forkbuild/backend.py", "vllm/fp8_inc/__init__.py"]
    for path in needed:
        assert {path, path.split("/")[0]} & set(copied()), path


@pytest.mark.parametrize("device", ["cpu", "gaudi"])
def test_versions_are_those_of_the_wheels(device):
    [label] = re.findall(r'image\.version="(.*?)"', " ".join(values(device, "LABEL")))
    assert label == FORK.version(device)


def test_pins_are_kept_in_one_place():
    assert not re.search(r"[0-9a-f]{40}", TEXT), "commits belong in upstream.toml"
    [inc] = [rest for rest in values("gaudi", "ARG") if rest.startswith("INC=")]
    assert inc.removeprefix("INC=") in FORK.settings["extras"]["test"]
    for key in re.findall(r"\$\(pin (\w+)\)", TEXT):
        assert FORK.pins["vllm-gaudi"][key]


def test_base_images_are_arguments():
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert set(bases) == {"${PYTHON_IMAGE}", "${GAUDI_IMAGE}", "source"}
    arguments = [rest for word, rest in instructions() if word == "ARG"]
    gaudi = "vault.habana.ai/gaudi-docker/1.24.1/ubuntu24.04/habanalabs"
    assert f"GAUDI_IMAGE={gaudi}/pytorch-installer-2.11.0:latest" in arguments


def test_every_build_argument_is_documented_with_its_default():
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| (\S*) \|", DOCS, re.M))
    for word, rest in instructions():
        name, _, default = rest.partition("=")
        if word == "ARG":
            assert name in DOCS
            if default and name in table:
                assert table[name] == f"`{default}`"


def test_no_secret_and_no_host_of_ours_is_in_the_image():
    hosts = set(re.findall(r"https?://([^/\s]+)", TEXT))
    assert hosts == {"download.pytorch.org"}
    for word, rest in instructions():
        if word in ("ARG", "ENV"):
            assert not re.search(r"PIP_|PROXY|TOKEN|PASSWORD|SECRET|KEY", rest, re.I)
        if word == "RUN" and re.search(r"pip (install|wheel)", rest):
            assert "type=secret,id=pip,target=/etc/pip.conf" in rest


def test_the_default_image_is_the_locked_down_one():
    names = [rest.split()[-1] for word, rest in instructions() if word == "FROM"]
    assert names[-1] == "cpu"
    [user] = values("cpu", "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number: Kubernetes checks it"
    written = re.findall(r"(\w+(?:HOME|ROOT|DIR)|HOME)=(\S+)", values("cpu", "ENV")[0])
    assert len(written) == 5
    assert all(path.startswith("/tmp") for _, path in written)


@pytest.mark.parametrize("device", ["cpu", "gaudi"])
def test_the_health_check_asks_the_port_that_is_served(device):
    [health] = values(device, "HEALTHCHECK")
    command = json.loads(health.partition(" CMD ")[2])
    compile(command[-1], "HEALTHCHECK", "exec")
    assert "curl" not in health
    flags = parser().parse_args(json.loads(values(device, "ENTRYPOINT")[0])[3:])
    assert f"'127.0.0.1', {flags.port}," in command[-1]
    assert values(device, "EXPOSE") == [str(flags.port)]


@pytest.mark.parametrize("device", ["cpu", "gaudi"])
def test_the_embedded_model_is_served_and_every_default_can_be_changed(device):
    command = json.loads(values(device, "ENTRYPOINT")[0])
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert values(device, "CMD") == []
    args = parser().parse_args(command[3:])
    assert (args.host, args.kv_cache_dtype) == ("0.0.0.0", "fp8_inc")
    assert args.enforce_eager == (device == "cpu")
    [folder] = values(device, "WORKDIR")
    target = f"examples/{args.model} {folder}/{args.model}"
    assert target in values(device, "COPY")
    changed = "--model other --kv-cache-dtype auto --no-enforce-eager".split()
    args = parser().parse_args([*command[3:], *changed])
    assert (args.model, args.kv_cache_dtype) == ("other", "auto")
    assert not args.enforce_eager


def test_every_docker_run_line_has_flags_and_variables_that_exist():
    ours = {adjustment.ENV, quant_config.ENV}
    assert len(docker_runs()) == 6
    for words in docker_runs():
        [at] = [i for i, word in enumerate(words) if word.startswith("vllm-fp8-inc:")]
        device = words[at].partition(":")[2]
        command = json.loads(values(device, "ENTRYPOINT")[0])
        parser().parse_args([*command[3:], *words[at + 1 :]])
        for flag, value in zip(words[:at], words[1:at]):
            if flag == "-e":
                assert value.partition("=")[0] in ours | READ_BY_OTHERS.keys()


def test_the_table_of_toggles_is_complete_and_right_about_the_cpu():
    rows = re.findall(r"^\| `(\S+?)` \| .* \| (.*?) \|$", DOCS, re.M)
    cpu = {name: text for name, text in rows if name in TOGGLES}
    assert cpu.keys() == TOGGLES
    for name, text in cpu.items():
        reported = name.startswith(environment._HPU_ONLY)
        assert ("one line at start names it" in text) == reported, name


@pytest.mark.skipif(
    "VLLM_GAUDI" not in os.environ, reason="set VLLM_GAUDI to a checkout of vllm-gaudi"
)
def test_the_worker_reads_the_toggles_of_the_document():
    files = Path(os.environ["VLLM_GAUDI"], "vllm_gaudi").rglob("*.py")
    source = "\n".join(path.read_text("utf-8") for path in files)
    for name, reader in READ_BY_OTHERS.items():
        assert reader != "vllm_gaudi" or name in source, name


@pytest.mark.skipif(
    not (ROOT / "patches" / "vllm_gaudi").exists(), reason="no patches of the worker"
)
def test_the_build_calls_commands_that_exist():
    [words] = re.findall(r"tools/patches\.py ([^;]*);", TEXT)
    assert patches.parse_args(words.split()).run


def test_host_paths_in_pip_settings_are_found(tmp_path):
    settings = [f"file://{tmp_path} https://index.example/simple", "180", "/nowhere"]
    assert image.host_paths(settings) == [str(tmp_path)]


def test_the_document_names_images_as_the_script_does():
    for target in ("cpu", "gaudi"):
        assert image.parse_args(["--target", target]).tag in DOCS
