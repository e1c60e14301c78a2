# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``vllm kv-scales``: the command line only; the work is in vllm.fp8_inc."""

import argparse
import sys
import typing

from vllm.entrypoints.cli.types import CLISubcommand

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
else:
    FlexibleArgumentParser = argparse.ArgumentParser

NAME = "kv-scales"
_ABOUT = "Inspect, calibrate, convert, compare and plot the scales of an FP8 KV cache."
_EXIT_CODES = "Exit code: 0 fine, 1 finding or error, 2 wrong usage."
_DEVICES = ("gaudi2", "gaudi3")


def _is_called() -> bool:
    return sys.argv[1:2] == [NAME]


if _is_called():
    # main() imports this module first: what the others log must not reach stdout,
    # which is for data.
    from vllm.fp8_inc.report import logs_to_stderr

    logs_to_stderr()


class KvScalesSubcommand(CLISubcommand):
    """The `kv-scales` subcommand for the vLLM CLI."""

    name = NAME

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        from vllm.fp8_inc.report import run_command

        sys.exit(run_command(args))

    def subparser_init(
        self, subparsers: argparse._SubParsersAction
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            NAME,
            help=_ABOUT,
            description=_ABOUT,
            usage=f"vllm {NAME} <command> [options]",
        )
        if _is_called():
            add_commands(parser)
        return parser


def cmd_init() -> list[CLISubcommand]:
    return [KvScalesSubcommand()]


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Adds the parser of every command."""
    commands = parser.add_subparsers(
        required=True, metavar="<command>", parser_class=argparse.ArgumentParser
    )
    for add in (_inspect,):
        add(commands)


def _command(
    commands: argparse._SubParsersAction, name: str, about: str, run: str, examples: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=about,
        description=about,
        usage=f"vllm {NAME} {name} [options]",
        epilog=f"{examples}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--format",
        choices=("table", "json", "csv"),
        default="table",
        help="of what is written to stdout; logs go to stderr (default: table)",
    )
    return parser


def _device(parser: argparse.ArgumentParser, default: str | None, about: str) -> None:
    parser.add_argument("--device", choices=_DEVICES, default=default, help=about)


def _inspect(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "inspect",
        "Show every KV scale of a checkpoint or file, and whether a server loads them.",
        "vllm.fp8_inc.inspection:run",
        """\
Reads headers and scale tensors only.

Examples:
  vllm kv-scales inspect MODEL
  vllm kv-scales inspect MODEL --strict --device gaudi2
  vllm kv-scales inspect MODEL --format json
  vllm kv-scales inspect scales.json --model MODEL
""",
    )
    parser.add_argument(
        "source",
        help="folder of a checkpoint, or a JSON in the form of "
        "--quantization-param-path",
    )
    parser.add_argument(
        "--model", help="folder of the checkpoint that a JSON is to be used with"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 for warnings too"
    )
    parser.add_argument(
        "--capacity", action="store_true", help="also show the size of the cache"
    )
    _device(parser, None, "the Gaudi that serves (default: both)")
