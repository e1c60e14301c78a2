#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Checks, exports and rebases the patches of this fork; see patches/README.md."""

import argparse
import platform
import sys
from pathlib import Path

from forkbuild.build import Build
from forkbuild.checks import problems
from forkbuild.devtree import DevTree
from forkbuild.export import exported
from forkbuild.fork import Fork, ForkError
from forkbuild.overlay import check_overlay, overlay_files
from forkbuild.patchset import Patch, load_series
from forkbuild.rebase import rebase_report
from forkbuild.table import stale_readmes
from forkbuild.trees import WheelTree, open_tree
from forkbuild.upstream import upstream_wheel
from forkbuild.worker import exported_worker, write_worker

PACKAGES = ("vllm", "vllm_gaudi")


def all_patches(root: Path) -> list[Patch]:
    """The patches of every package that has a folder."""
    folders = (root / "patches" / package for package in PACKAGES)
    return [
        patch for folder in folders if folder.is_dir() for patch in load_series(folder)
    ]


def the_build(fork: Fork) -> Build:
    """The CPU build: it has every file."""
    tags = fork.wheel_pin(platform.machine()).tags
    return Build(fork, WheelTree(upstream_wheel(fork)), "cpu", tags)


def check(fork: Fork, args: argparse.Namespace) -> int:
    """Each patch against the pinned upstream; the overlay; the tables."""
    build = the_build(fork)
    check_overlay(overlay_files(fork.root), build.upstream.names)
    checked = [(build.patches, build.upstream)]
    if args.vllm_gaudi:
        folder = fork.root / "patches" / "vllm_gaudi"
        checked.append((load_series(folder), open_tree(args.vllm_gaudi)))
    found = [line for patches, tree in checked for line in problems(patches, tree)]
    if not found:  # a table of unreadable headers says nothing new
        found = stale_tables(fork)
    for problem in found:
        print(problem)
    for patches, tree in checked if not found else ():
        print(f"{len(patches)} patches apply to {tree.label}")
    return bool(found)


def stale_tables(fork: Fork) -> list[str]:
    """One line for each README whose table is not current."""
    return [
        f"{path.relative_to(fork.root)}: table is stale; run `tools/patches.py table`"
        for path in stale_readmes(fork.root, all_patches(fork.root))
    ]


def export(fork: Fork, args: argparse.Namespace) -> int:
    """The edits in build/dev, or in a copy of the worker, become the patches."""
    if args.worker:
        checkout, place = args.worker
        folder = fork.root / "patches" / "vllm_gaudi"
        changed = exported_worker(checkout, place, load_series(folder))
    else:
        place = "build/dev"
        tree = DevTree(the_build(fork))
        if not tree.exists:
            raise ForkError("there is no build/dev to export; run `pip install -e .`")
        changed = exported(tree)
    verb = "differs from" if args.check else "written from"
    for patch, text in changed.items():
        print(f"{patch.name}: {verb} {place}")
        if not args.check:
            patch.path.write_bytes(text.encode("utf-8"))
    return bool(changed) and args.check


def table(fork: Fork, args: argparse.Namespace) -> int:
    """The READMEs' tables from the headers."""
    if args.check:
        stale = stale_tables(fork)
        print("\n".join(stale) or "tables are current")
        return bool(stale)
    for path, text in stale_readmes(fork.root, all_patches(fork.root)).items():
        path.write_text(text, "utf-8")
        print(f"{path.relative_to(fork.root)}: written")
    return 0


def rebase(fork: Fork, args: argparse.Namespace) -> int:
    """Each patch, and the overlay, against another upstream release."""
    tree = open_tree(args.upstream)
    failed = False
    for patch in load_series(fork.root / "patches" / args.package):
        applies, report = rebase_report(patch, tree)
        failed |= not applies
        print(f"{patch.name}: {report}")
    if args.package == "vllm":
        check_overlay(overlay_files(fork.root), tree.names)
    return failed


def worker(fork: Fork, args: argparse.Namespace) -> int:
    """A checkout of vllm-gaudi becomes an importable folder, with the patches."""
    folder = fork.root / "patches" / "vllm_gaudi"
    patches = [] if args.unpatched else load_series(folder)
    write_worker(args.checkout, args.out, patches)
    print(f"{args.out}: {args.checkout} with {len(patches)} patches")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("check", help="do all patches meet the rules?")
    add.add_argument(
        "--vllm-gaudi",
        type=Path,
        metavar="DIR",
        help="also check patches/vllm_gaudi against this checkout of vllm-gaudi",
    )
    add.set_defaults(run=check)
    add = commands.add_parser("export", help="write the edits in build/dev to patches")
    add.add_argument("--check", action="store_true", help="fail if any would change")
    add.add_argument(
        "--worker",
        type=Path,
        nargs=2,
        metavar=("CHECKOUT", "OUT"),
        help="write the edits in OUT, made by `worker`, to patches/vllm_gaudi instead",
    )
    add.set_defaults(run=export)
    add = commands.add_parser("table", help="write the tables in the READMEs")
    add.add_argument("--check", action="store_true", help="fail if any is stale")
    add.set_defaults(run=table)
    add = commands.add_parser("rebase", help="try the patches on another release")
    add.add_argument("upstream", type=Path, help="a wheel, or a source folder")
    add.add_argument("--package", choices=PACKAGES, default="vllm")
    add.set_defaults(run=rebase)
    add = commands.add_parser("worker", help="write a patched copy of the HPU worker")
    add.add_argument("checkout", type=Path, help="a checkout of vllm-gaudi")
    add.add_argument("out", type=Path, help="the folder to write, for PYTHONPATH")
    add.add_argument("--unpatched", action="store_true", help="leave the patches out")
    add.set_defaults(run=worker)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, root: Path | None = None) -> int:
    """Runs one command; returns the exit code."""
    args = parse_args(argv)
    fork = Fork(root or Path(__file__).resolve().parents[1])
    try:
        return int(args.run(fork, args))
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
