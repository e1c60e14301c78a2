# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Runs ``vllm kv-scales`` inside the test process."""

import argparse
import json
import shlex
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.cli.kv_scales import add_commands
from vllm.fp8_inc.report import run_command


@dataclass(frozen=True)
class Outcome:
    """What a call left.

    Attributes:
        code: The exit code.
        out: stdout.
        err: stderr.
    """

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm kv-scales")
    add_commands(parser)
    return parser


def call(capfd, *words: object) -> Outcome:
    """Runs a command line without ``vllm kv-scales``."""
    capfd.readouterr()
    try:
        code = run_command(parser().parse_args([str(word) for word in words]))
    except SystemExit as exit_:
        code = exit_.code
    out, err = capfd.readouterr()
    return Outcome(code, out, err)


def examples(command: str) -> list[list[str]]:
    """The command lines that ``--help`` of a command shows, as words."""
    commands = parser()._subparsers._group_actions[0].choices
    lines = commands[command].epilog.replace("\\\n", "").splitlines()
    lines = [line.split("vllm kv-scales ")[1] for line in lines if "  vllm" in line]
    return [shlex.split(line) for line in lines]
