# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes the tables and the plot of accuracy from benchmarks/results.

``python -m benchmarks.report``
"""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.decision_chart import DOCS, PAGE
from benchmarks.record import RESULTS, markdown, write_between

README = DOCS.parent / "README.md"
PLOT = DOCS / "figures" / "latent-range.svg"
DEVICES = ("gaudi2", "gaudi3")
SCALES = ("unit", "k-only", "calibrated")
NOT_RUN = "-"

Content = dict[str, Any]


def read(name: str) -> Content:
    """A result file; empty where it was not made."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {"settings": {}, "rows": {}}
    return json.loads(path.read_text())


def around(row: Mapping[str, float], value: str, interval: str, digits: int) -> str:
    """A difference with its interval."""
    if value not in row:
        return NOT_RUN
    return f"{row[value]:+.{digits}f} ± {row[interval]:.{digits}f}"


def figure(row: Mapping[str, float], name: str, form: str) -> str:
    return format(row[name], form) if name in row else NOT_RUN


def of(settings: Mapping[str, Any]) -> str:
    """The settings in one line."""
    return "; ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in settings.items()
    )


def _number(model: str) -> int:
    return int(model.partition("2^")[2] or 0)


def latent_table(content: Content) -> str:
    """Divergence of every model and arm."""
    names = [name.rsplit(", ", 2) for name in content["rows"] if ", " in name]
    models = list(dict.fromkeys(model for model, _, _ in names))
    models.sort(key=lambda m: (m.split()[0], _number(m)))
    rows = []
    for model in models:
        cells = [model]
        for device in DEVICES:
            for scales in SCALES:
                row = content["rows"].get(f"{model}, {scales}, {device}", {})
                kl = figure(row, "kl", ".2g")
                cells.append(f"{kl} ± {row['kl_ci95']:.1g}" if row else NOT_RUN)
        rows.append(cells)
    head = ["latent"]
    head += [f"{s}, {d.capitalize()}" for d in DEVICES for s in SCALES]
    return markdown(head, rows)


def latent_answers(content: Content) -> str:
    """Accuracy and perplexity, where questions were asked."""
    rows = []
    for name, row in content["rows"].items():
        if "right_difference" not in row:
            continue
        model, scales, device = name.rsplit(", ", 2)
        rows.append(
            [
                f"{model}, {scales}, {device.capitalize()}",
                figure(row, "right", ".3f"),
                around(row, "right_difference", "right_ci95", 3),
                figure(row, "perplexity", ".3f"),
                figure(row, "top1", ".3f"),
            ]
        )
    head = ["latent, scales", "right", "difference to unquantised", "perplexity"]
    return markdown([*head, "same favourite"], rows)


def request_table(content: Content) -> str:
    """lm-eval's figures, as the original request has them, with their difference."""
    rows = []
    for name, row in content["rows"].items():
        cells = [name]
        for chosen in ("flexible-extract", "strict-match"):
            value = figure(row, chosen, ".4f")
            cells.append(f"{value} ± {figure(row, f'{chosen} stderr', '.4f')}")
        is_base = name.startswith("bf16")
        chosen = "strict-match"
        change = around(row, f"{chosen} difference", f"{chosen} ci95", 4)
        cells.append("" if is_base else change)
        cells.append(figure(row, "perplexity", ".4f"))
        cells.append("" if is_base else figure(row, "forced kl_mean", ".2g"))
        rows.append(cells)
    head = ["KV cache", "flexible-extract", "strict-match"]
    head += ["difference to bf16 (95 %)", "perplexity", "KL to bf16"]
    return markdown(head, rows)


def gqa_table(content: Content) -> str:
    """The real model's arms."""
    rows = [
        [
            name,
            figure(row, "perplexity", ".3f"),
            around(row, "nll_difference", "nll_ci95", 5),
            f"{figure(row, 'kl', '.2e')} ± {figure(row, 'kl_ci95', '.0e')}",
            figure(row, "top1", ".4f"),
        ]
        for name, row in content["rows"].items()
    ]
    head = ["KV cache", "perplexity", "difference of nll a token", "KL"]
    return markdown([*head, "same favourite"], rows)


def query_table(content: Content) -> str:
    """Ways to scale q, a column a model and device: the median and the worst layer."""
    names = [name.rsplit(", ", 2) for name in content["rows"]]
    columns = list(dict.fromkeys((model, device) for model, device, _ in names))
    rows = []
    for way in dict.fromkeys(way for _, _, way in names):
        cells = [way]
        for model, device in columns:
            row = content["rows"][f"{model}, {device}, {way}"]
            cells.append(f"{row['median']:.2g} / {row['worst']:.2g}")
        rows.append(cells)
    head = [f"{model}, {device.capitalize()}" for model, device in columns]
    return markdown(["scale of q", *head], rows)


def differential_table(content: Content) -> str:
    """Quantiles of the difference to the oracle."""
    rows = []
    names: list[str] = []
    for name, row in content["rows"].items():
        names = [key for key in row if key.startswith("q")]
        share = f"{row['prompts below 1e-3']:.3f}"
        cells = [f"{row[key]:.1e}" for key in names]
        rows.append([name, f"{row['positions']:.0f}", *cells, share])
    head = ["KV cache", "positions", *(f"{float(n[1:]):.4g}" for n in names)]
    return markdown([*head, "prompts with no difference above 1e-3"], rows)


def plot(content: Content) -> None:
    """Divergence over the power of two of the whole cached row."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from vllm.fp8_inc.plotting.figures import COLOURS, style

    with style(), rc_context({"svg.fonttype": "none"}):
        drawn = Figure(figsize=(6.6, 2.9), layout="constrained")
        panels = drawn.subplots(1, 2, sharey=True)
        for axes, device in zip(panels, DEVICES):
            for n, scales in enumerate(SCALES):
                points = _points(content["rows"], scales, device)
                exponents, values, intervals = zip(*points)
                axes.errorbar(
                    [e + 0.25 * (n - 1) for e in exponents],  # beside each other
                    values,
                    intervals,
                    fmt="os^"[n] + ("-", "--", ":")[n],
                    color=COLOURS[n],
                    ms=4,
                    lw=1.2,
                    capsize=2,
                    label=scales,
                )
            axes.set_title(device.capitalize(), loc="left", fontsize=9)
            axes.set_yscale("log", nonpositive="clip")
            axes.set_ylim(1e-4, 10)
            axes.set_xlabel("cached row times 2^")
        panels[0].set_ylabel("KL divergence to unquantised")
        panels[0].legend(frameon=False)
        PLOT.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(PLOT, format="svg", metadata={"Date": None})


def _points(
    rows: Mapping[str, Mapping[str, float]], scales: str, device: str
) -> list[tuple[int, float, float]]:
    found = []
    for name, row in rows.items():
        model, _, rest = name.partition(", ")
        if rest == f"{scales}, {device}" and model.startswith(("row", "as trained")):
            found.append((_number(model), row["kl"], row["kl_ci95"]))
    return sorted(found)


def main() -> None:
    """Writes the tables of docs/fp8-on-gaudi.md and README, and the plot."""
    latent = read("latent-range")
    tables = {
        "results-request": (request_table, read("request-table")),
        "results-latent": (latent_table, latent),
        "results-answers": (latent_answers, latent),
        "gqa": (gqa_table, read("gqa")),
        "query": (query_table, read("query-scales")),
        "differential": (differential_table, read("differential")),
    }
    for name, (draw, content) in tables.items():
        if content["rows"]:
            text = f"{draw(content)}\n\n{of(content['settings'])}."
            write_between(PAGE, name, text)
            if name == "results-request":
                write_between(README, name, text)
    if latent["rows"]:
        plot(latent)


if __name__ == "__main__":
    main()
