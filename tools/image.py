#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Builds an image, runs it as an operator would, and asks it a question.

The container has a read-only root file system, no root user, no capabilities and no
network. See docs/images.md.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "asked"  # not the image's own model name: flags must reach the server
QUESTION = (
    "Lena has 23 apples. Lena buys 45 more apples. How many apples does Lena have now?"
)
ANSWER = "68"
LOADED = "fp8_inc: KV scales of 4 of 4 layers"
LOCKED = "--read-only --tmpfs /tmp --network none --cap-drop ALL".split()
# vLLM's processes talk through 160 MiB of /dev/shm; a container has 64 MB unasked.
LOCKED += ["--shm-size", "1g"]
LOCKED += ["--security-opt", "no-new-privileges"]
CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=120)
body = {"model": sys.argv[1], "temperature": 0,
        "messages": [{"role": "user", "content": sys.argv[2]}]}
headers = {"Content-Type": "application/json"}
connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
answer = json.load(connection.getresponse())
print(answer["choices"][0]["message"]["content"] if "choices" in answer else answer)
"""


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command's text output; SystemExit with it where the command fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and result.returncode:
        raise SystemExit(f"error: {' '.join(command)}:\n{result.stdout}{result.stderr}")
    return result


def pick_engine() -> str:
    """The first engine that answers: docker, else podman."""
    for engine in ("docker", "podman"):
        if shutil.which(engine) and not run(engine, "info", check=False).returncode:
            return engine
    raise SystemExit("error: neither `docker info` nor `podman info` succeeds here")


def pip_settings() -> dict[str, str]:
    """This host's pip configuration, environment variables included."""
    listed = run(sys.executable, "-m", "pip", "config", "list").stdout
    found = re.findall(r"^(global|site|user|:env:)\.(\S+)='(.*)'$", listed, re.M)
    return {key: value for _, key, value in found}


def host_paths(values: list[str]) -> list[str]:
    """The absolute paths in settings that exist here, once each."""
    words = [word.removeprefix("file://") for value in values for word in value.split()]
    return sorted({w for w in words if w.startswith("/") and Path(w).exists()})


def build(engine: str, args: argparse.Namespace) -> None:
    """Builds the target; pip's configuration and its local folders come along."""
    settings = pip_settings()
    values = [*settings.values(), *(arg.partition("=")[2] for arg in args.build_arg)]
    revision = run("git", "-C", str(ROOT), "rev-parse", "HEAD", check=False).stdout
    command = [engine, "build", "--target", args.target, "--tag", args.tag]
    for arg in [f"REVISION={revision.strip() or 'unknown'}", *args.build_arg]:
        command += ["--build-arg", arg]
    paths = [*host_paths(values), *args.mount]
    if engine == "podman":
        command += ["--format", "docker"]  # the OCI format has no health check
        for path in paths:
            command += ["--volume", f"{path}:{path}:ro"]
    elif paths:
        print(f"docker mounts none of {', '.join(paths)} into a build", file=sys.stderr)
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as config:
        lines = [f"{key} = {value}" for key, value in settings.items()]
        config.write("\n".join(["[global]", *lines, ""]))
        config.flush()
        command += ["--secret", f"id=pip,src={config.name}", str(ROOT)]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"error: the build of target {args.target} failed")


def inspect(engine: str, tag: str) -> dict[str, Any]:
    """What the engine knows of an image."""
    return json.loads(run(engine, "image", "inspect", tag).stdout)[0]


def health_command(image: dict[str, Any]) -> list[str]:
    """The command of the image's HEALTHCHECK."""
    check = image["Config"].get("Healthcheck") or image.get("Healthcheck")
    if not check or check["Test"][0] != "CMD":
        raise SystemExit(f"error: no HEALTHCHECK with a command in the image: {check}")
    return check["Test"][1:]


def wait_for_health(engine: str, container: str, command: list[str], limit: int):
    """Returns the seconds until the health check succeeds."""
    start = time.monotonic()
    while run(engine, "exec", container, *command, check=False).returncode:
        state = run(engine, "inspect", "--format", "{{.State.Running}}", container)
        if state.stdout.strip() != "true":
            raise SystemExit("error: the container has stopped")
        if time.monotonic() - start > limit:
            raise SystemExit(f"error: not healthy after {limit} s")
        time.sleep(1)
    return time.monotonic() - start


def checks(engine: str, container: str, health: list[str], limit: int) -> None:
    """Prints what holds for a running container; stops at the first that does not."""

    def inside(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run(engine, "exec", container, *command, check=check)

    seconds = wait_for_health(engine, container, health, limit)
    print(f"healthy after {seconds:.0f} s, by the image's own HEALTHCHECK")
    uid = inside("id", "-u").stdout.strip()
    written = inside("touch", "/models/x", check=False).returncode == 0
    if uid == "0" or written:
        raise SystemExit(f"error: uid {uid}; the root file system writable: {written}")
    print(f"uid {uid}; the root file system is read-only")
    log = run(engine, "logs", container)
    loaded = [line for line in (log.stdout + log.stderr).splitlines() if LOADED in line]
    if not loaded:
        raise SystemExit(f"error: no line with {LOADED!r} in the server's log")
    print(loaded[0][loaded[0].index("fp8_inc") :])
    answer = inside("python", "-c", CLIENT, NAME, QUESTION).stdout.strip()
    print(f"asked: {QUESTION}\nanswered: {answer}")
    if not re.search(rf"\b{ANSWER}\b", answer):
        raise SystemExit(f"error: the answer should be {ANSWER}")


def serve_and_ask(engine: str, args: argparse.Namespace) -> None:
    """Runs the image, checks it, and removes the container."""
    health = health_command(inspect(engine, args.tag))
    options = [*LOCKED, *args.run_option]
    flags = ["--served-model-name", NAME]
    started = run(engine, "run", "--detach", *options, args.tag, *flags)
    container = started.stdout.strip()
    try:
        checks(engine, container, health, args.limit)
    except SystemExit:
        log = run(engine, "logs", "--tail", "200", container, check=False)
        print(log.stdout + log.stderr, file=sys.stderr)
        raise
    finally:
        run(engine, "rm", "--force", container, check=False)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("cpu", "gaudi"), default="cpu")
    parser.add_argument("--tag", help="the image; default: vllm-fp8-inc:TARGET")
    parser.add_argument("--engine", choices=("docker", "podman"))
    parser.add_argument("--build-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--mount", action="append", default=[], help="a path that the build sees too"
    )
    parser.add_argument("--run-option", action="append", default=[], metavar="OPTION")
    parser.add_argument("--no-build", action="store_true", help="the image is there")
    parser.add_argument(
        "--limit", type=int, default=600, help="seconds until it must be healthy"
    )
    args = parser.parse_args(argv)
    args.tag = args.tag or f"vllm-fp8-inc:{args.target}"
    return args


def main(argv: list[str] | None = None) -> int:
    """Builds, reports the size, and runs the cpu image."""
    args = parse_args(argv)
    engine = args.engine or pick_engine()
    if not args.no_build:
        build(engine, args)
    size = inspect(engine, args.tag)["Size"]
    print(f"{args.tag}: {size / 1e9:.2f} GB, built by {engine}")
    if args.target == "cpu":
        serve_and_ask(engine, args)
    else:
        print("not run: that takes a Gaudi; see docs/images.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
