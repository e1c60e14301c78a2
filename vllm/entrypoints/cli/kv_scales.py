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
_DATASET = "HuggingFaceH4/ultrachat_200k:train_sft"


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
    for add in (_inspect, _calibrate, _convert, _compare, _plot):
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
  vllm kv-scales inspect quantize.json --device gaudi3
""",
    )
    parser.add_argument(
        "source",
        help="folder of a checkpoint, INC's quant-config or its folder, or a JSON in "
        "the form of --quantization-param-path",
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
    _device(parser, None, "the Gaudi that serves (default: both; gaudi3 for INC)")


def _calibrate(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "calibrate",
        "Measure what the model caches on texts, and write scales for it.",
        "vllm.fp8_inc.calibration.run:run",
        """\
The model runs with a cache that is not quantised.

Examples:
  vllm kv-scales calibrate MODEL --output-dir OUT
  vllm kv-scales calibrate MODEL --output-dir OUT --dataset texts.txt \\
      --num-prompts 64 --device gaudi2 --method mse
  vllm kv-scales calibrate MODEL --output-dir OUT --dataset texts.jsonl \\
      --export inc --scale-method maxabs_pow2
""",
    )
    add = parser.add_argument
    add("model", help="folder of the checkpoint")
    add("--output-dir", required=True, help="a folder that is not there yet")
    add(
        "--dataset",
        default=_DATASET,
        help='a .jsonl with "text", "prompt" or "messages" a line, a .txt with a text '
        "a line, or the name of a data set on the hub, as NAME or NAME:SPLIT "
        f"(default: {_DATASET})",
    )
    add("--num-prompts", type=int, default=512, help="at most (default: 512)")
    add("--max-model-len", type=int, default=2048, help="prompts are cut to it")
    add(
        "--granularity",
        choices=("tensor", "head"),
        default="tensor",
        help="one scale, or one a head (default: tensor)",
    )
    add(
        "--method",
        choices=("amax", "percentile", "mse"),
        default="amax",
        help="scale the largest value seen, a percentile, or what makes the output "
        "of attention least wrong (default: amax)",
    )
    add("--percentile", type=float, default=99.99, help="(default: 99.99)")
    add(
        "--export",
        choices=("compressed-tensors", "inc"),
        default="compressed-tensors",
        help="a checkpoint, or INC's measurement and quant-config JSON",
    )
    add(
        "--scale-method",
        default="maxabs_hw",
        help="that INC's JSON names (default: maxabs_hw)",
    )
    add("--copy", action="store_true", help="copy the large shards, do not link them")
    add("--resume", action="store_true", help="go on after an interruption")
    add("--tensor-parallel-size", type=int, default=1)
    add("--trust-remote-code", action="store_true")
    _device(parser, "gaudi3", "the Gaudi whose format scales fill (default: gaudi3)")


def _convert(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "convert",
        "Write the scales of one producer in the form of another.",
        "vllm.fp8_inc.conversion.run:run",
        """\
The format that the scales fill is kept unless --device names another.

Examples:
  vllm kv-scales convert MODEL OUT --to modelopt --dry-run
  vllm kv-scales convert scales.json OUT --to compressed-tensors --model MODEL
  vllm kv-scales convert MODEL out.json --to legacy --lossy --device gaudi2
""",
    )
    forms = ("compressed-tensors", "modelopt", "autofp8", "quark", "inc", "legacy")
    add = parser.add_argument
    add("source", help="folder of a checkpoint, INC's quant-config or a legacy JSON")
    add("destination", help="a folder, or for legacy a file, that is not there yet")
    add("--from", dest="from_", choices=forms, help="(default: found out)")
    add("--to", choices=forms, required=True)
    add("--model", help="folder of the checkpoint that a JSON is for")
    add("--dry-run", action="store_true", help="show the difference, write nothing")
    add("--lossy", action="store_true", help="drop what the target cannot hold")
    add("--copy", action="store_true", help="copy the large shards, do not link them")
    _device(parser, None, "the Gaudi whose format the scales shall fill")


def _compare(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "compare",
        "Measure what the FP8 cache costs a model, on tasks or on texts.",
        "vllm.fp8_inc.comparison.run:run",
        """\
Arms: bf16 (the reference), fp8-unit (dequant_scale 1.0), fp8-loaded (the scales of
the checkpoint). The exit code is 1 where an arm is worse beyond noise.

Examples:
  vllm kv-scales compare MODEL --arms bf16,fp8-unit,fp8-loaded --text texts.jsonl
  vllm kv-scales compare MODEL --arms bf16,fp8-loaded --tasks task.yaml --limit 20
""",
    )
    add = parser.add_argument
    add("model", help="folder of the checkpoint")
    add("--arms", default="bf16,fp8-loaded", help="(default: bf16,fp8-loaded)")
    add("--tasks", help="of lm-eval: names, or YAML files, separated by commas")
    add("--text", help="teacher-forced: a .jsonl or .txt, as for calibrate")
    add("--limit", type=int, help="questions of a task, or texts, at most")
    add("--max-model-len", type=int, default=2048, help="texts are cut to it")
    add("--output-json", help="also write the result to this file")
    add("--work-dir", help="keeps each finished arm; a second call goes on from there")
    add("--tensor-parallel-size", type=int, default=1)
    add("--trust-remote-code", action="store_true")
    _device(parser, "gaudi3", "the Gaudi whose numbers are used (default: gaudi3)")


def _plot(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "plot",
        "Draw scales by layer, and largest magnitudes against the range of the format.",
        "vllm.fp8_inc.plotting.run:run",
        """\
Examples:
  vllm kv-scales plot MODEL --fig-dir figures
  vllm kv-scales plot MODEL scales.json --fig-dir figures --dry-run
""",
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="source", help="as for convert; overlaid")
    add("--fig-dir", required=True, help="gets a PNG and an SVG of each figure")
    add("--dry-run", action="store_true", help="name the figures, write nothing")
    _device(parser, "gaudi3", "for INC, whose scales depend on it (default: gaudi3)")
