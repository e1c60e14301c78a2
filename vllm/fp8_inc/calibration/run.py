# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``vllm kv-scales calibrate``: runs the model over texts and writes the scales."""

import argparse
from pathlib import Path

from vllm.fp8_inc.calibration.export import export, serve_command
from vllm.fp8_inc.calibration.measure import calibrate, state_file
from vllm.fp8_inc.calibration.result import Calibration
from vllm.fp8_inc.report import FINE, Report, Table, UsageError
from vllm.fp8_inc.sources.folder import Folder
from vllm.fp8_inc.whole_folder import check_writable

_CONVERGED = 0.02


def run(args: argparse.Namespace) -> int:
    """Calibrates ``args.model``; returns the exit code.

    Raises:
        UsageError: For options that do not go together.
        ValueError: If a layer saw nothing, or nothing that can be scaled.
    """
    folder = Folder.open(args.model)
    out = Path(args.output_dir)
    _check(args, folder, out)
    calibration = calibrate(args, folder)
    export(folder, calibration, out, args)
    state_file(out).unlink(missing_ok=True)
    report = Report("scales", _table(calibration))
    report.facts = {
        "output_dir": str(out),
        "tokens": calibration.tokens,
        "growth": calibration.growth,
        "converged": calibration.growth <= _CONVERGED,
        "serve": serve_command(out, args),
    }
    report.lines = [
        f"{calibration.tokens:,} tokens of {calibration.prompts} prompts",
        _convergence(calibration),
        f"serve with: {serve_command(out, args)}",
    ]
    report.write(args.format)
    return FINE


def _check(args: argparse.Namespace, folder: Folder, out: Path) -> None:
    if args.granularity == "head" and folder.is_mla:
        raise UsageError(
            "--granularity head: MLA caches one latent for all heads; use tensor"
        )
    if args.granularity == "head" and args.export == "inc":
        raise UsageError("--granularity head: INC's files have one amax a tensor")
    if out.exists():
        raise UsageError(f"--output-dir {out} is there already; name another")
    if args.num_prompts < 1 or args.max_model_len < 2:
        raise UsageError("--num-prompts and --max-model-len are too small")
    if not 0 < args.percentile <= 100:
        raise UsageError(f"--percentile {args.percentile}: over 0, at most 100")
    if args.resume and args.method == "percentile":
        raise UsageError("--resume: percentiles cannot be resumed; start anew")
    if args.resume and not state_file(out).is_file():
        raise ValueError(f"--resume: there is no {state_file(out)}; start anew")
    _ = folder.keys  # what cannot be read is known before the engine starts
    check_writable(out)


def _convergence(calibration: Calibration) -> str:
    grown = f"grew by at most {calibration.growth:.2%} over the last tenth of the data"
    if calibration.growth <= _CONVERGED:
        return f"converged: amax {grown}"
    return f"NOT converged: amax {grown} ({calibration.riser}); take more prompts"


def _table(calibration: Calibration) -> Table:
    rows = []
    scales = calibration.dequant_scales()
    for layer, roles in calibration.amax.items():
        for role, numbers in roles.items():
            amax = numbers[0] if len(numbers) == 1 else numbers
            rows.append((layer, role, amax, None))
        for role, numbers in scales[layer].items():
            scale = numbers[0] if len(numbers) == 1 else numbers
            rows.append((layer, f"{role}_scale", None, scale))
    return Table(("layer", "role", "amax", "dequant_scale"), rows)
