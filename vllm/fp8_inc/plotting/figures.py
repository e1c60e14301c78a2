# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The figures themselves; readable without colour and for the colour-blind."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.fp8_inc.plotting.source import Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's; markers and lines differ too, for print in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS, _LINES = "os^Dv*", ("-", "--", ":", "-.")
_ROLES = {"latent": "latent (kv_c, k_pe)", "k": "K", "v": "V", "q": "Q"}
_SMALLEST, _SMALLEST_NORMAL = 2.0**-9, 2.0**-6
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.hashsalt": "kv-scales",  # equal input, equal file
}
_WIDTH, _HEIGHT = 6.6, 2.4


def style() -> Any:
    """A context in which figures are made and saved."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def roles_of(sources: Sequence[Source]) -> list[str]:
    """The roles that any source has, in a fixed order."""
    return [role for role in _ROLES if any(role in s.scales for s in sources)]


def draw_scales(sources: Sequence[Source]) -> "Figure":
    """The dequant scale of each layer, a panel a role, the sources overlaid."""
    figure, panels = _panels(roles_of(sources))
    for role, axes in panels.items():
        for n, source in enumerate(sources):
            if role in source.scales:
                _line(axes, source.scales[role], n, _made_for(source))
        axes.set_ylabel("dequant scale")
    return _finished(figure, panels, "Dequant scale by layer")


def draw_range(sources: Sequence[Source]) -> "Figure":
    """The largest magnitude of each layer against what its scale can hold."""
    figure, panels = _panels(roles_of(sources))
    for role, axes in panels.items():
        for n, source in enumerate(sources):
            if role not in source.scales:
                continue
            _bars(axes, source.scales.get(role, {}), source, n, len(sources))
            kind = "measured" if source.measured else "implied"
            marks = _shifted(source.amax.get(role, {}), n, len(sources))
            label = f"{source.label}: amax ({kind})"
            axes.plot(*marks, _MARKERS[n], color=COLOURS[n], ms=4, label=label)
        axes.set_ylabel("magnitude")
    title = "amax against the range of the format (hatched: subnormal)"
    return _finished(figure, panels, title)


def draw_error(sources: Sequence[Source]) -> "Figure":
    """Squared error of attention's output, one operand quantised, over its square."""
    figure, panels = _panels([r for r in _ROLES if any(r in s.error for s in sources)])
    for role, axes in panels.items():
        for n, source in enumerate(sources):
            if role in source.error:
                _line(axes, source.error[role], n, _made_for(source))
        axes.set_ylabel("relative squared error")
    return _finished(figure, panels, "Error of attention's output by layer")


def _panels(roles: Sequence[str]) -> "tuple[Figure, dict[str, Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(roles) + 0.6), layout="constrained")
    axes = figure.subplots(len(roles), sharex=True, squeeze=False)[:, 0]
    for role, panel in zip(roles, axes, strict=True):
        panel.set_title(_ROLES[role], loc="left", fontsize=9)
        panel.set_yscale("log", base=2)
    return figure, dict(zip(roles, axes, strict=True))


def _finished(figure: "Figure", panels: "dict[str, Axes]", title: str) -> "Figure":
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure.suptitle(title, fontsize=10)
    last = list(panels.values())[-1]
    last.set_xlabel("layer")
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels.values():
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}"))
    legend: dict[str, Any] = {}
    for axes in panels.values():
        legend |= {text: mark for mark, text in zip(*axes.get_legend_handles_labels())}
        low, high = (math.log2(y) for y in axes.get_ylim())
        axes.set_ylim(2 ** math.floor(low), 2 ** math.ceil(high))  # whole octaves
    figure.legend(
        legend.values(), legend, loc="outside lower center", ncols=2, frameon=False
    )
    return figure


def _line(axes: "Axes", series: dict[int, float], n: int, label: str) -> None:
    axes.plot(
        list(series),
        list(series.values()),
        _MARKERS[n] + _LINES[n % len(_LINES)],
        color=COLOURS[n],
        fillstyle="full" if n % 2 == 0 else "none",
        ms=4,
        lw=1,
        label=label,
    )


def _bars(
    axes: "Axes", series: dict[int, float], source: Source, n: int, of: int
) -> None:
    """From the smallest number that a layer's scale can hold to the largest."""
    layers, scales = _shifted(series, n, of)
    width = 0.7 / of
    parts = (
        (_SMALLEST_NORMAL, source.format.max, "", "normal"),
        (_SMALLEST, _SMALLEST_NORMAL, "////", None),
    )
    for low, high, hatch, name in parts:
        axes.bar(
            layers,
            [s * (high - low) for s in scales],
            width,
            [s * low for s in scales],
            color=COLOURS[n],
            alpha=0.25,
            hatch=hatch,
            edgecolor=COLOURS[n],
            lw=0.5,
            label=name and f"{_made_for(source)}: range",
        )


def _shifted(
    series: dict[int, float], n: int, of: int
) -> tuple[list[float], list[float]]:
    """Sources stand beside each other."""
    shift = (n - (of - 1) / 2) * 0.7 / of
    return [layer + shift for layer in series], list(series.values())


def _made_for(source: Source) -> str:
    return f"{source.label} ({source.format.name}, {source.format.max:g})"
