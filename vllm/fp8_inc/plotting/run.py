# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""``vllm kv-scales plot``: figures of one source, or of several overlaid."""

import argparse
from pathlib import Path
from typing import Any

from vllm.fp8_inc.plotting.figures import (
    COLOURS,
    draw_error,
    draw_range,
    draw_scales,
    style,
)
from vllm.fp8_inc.plotting.source import read_source
from vllm.fp8_inc.report import FINE, Report, Table, UsageError
from vllm.fp8_inc.whole_folder import new_file

_FORMATS = ("png", "svg")
_DPI = 200


def run(args: argparse.Namespace) -> int:
    """Writes the figures; returns the exit code.

    Raises:
        UsageError: Without matplotlib, or for more sources than there are colours.
        ValueError: For a source that no server would load.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("plot needs matplotlib: pip install matplotlib") from None
    if len(args.sources) > len(COLOURS):
        raise UsageError(f"at most {len(COLOURS)} sources")
    sources = [read_source(path, args.device) for path in args.sources]
    drawn = {"scales": draw_scales, "range": draw_range}
    if any(source.error for source in sources):
        drawn["error"] = draw_error
    folder = Path(args.fig_dir)
    rows: list[tuple[Any, ...]] = []
    for name, draw in drawn.items():
        with style():
            figure = None if args.dry_run else draw(sources)
            for ending in _FORMATS:
                path = folder / f"kv-scales-{name}.{ending}"
                if figure is not None:
                    _save(figure, path, ending)
                labels = ", ".join(source.label for source in sources)
                rows.append((name, str(path), labels, not args.dry_run))
    report = Report("figures", Table(("figure", "file", "sources", "written"), rows))
    report.write(args.format)
    return FINE


def _save(figure: Any, path: Path, ending: str) -> None:
    # No date: equal input gives an equal file.
    metadata = {"Date": None} if ending == "svg" else {"Software": None}
    with new_file(path) as part:
        figure.savefig(part, format=ending, dpi=_DPI, metadata=metadata)
