# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Draws the decision chart of docs/fp8-on-gaudi.md, and writes it as text there.

``python -m benchmarks.decision_chart``
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.record import write_between

DOCS = Path(__file__).parents[1] / "docs"
SVG = DOCS / "figures" / "decision.svg"
PAGE = DOCS / "fp8-on-gaudi.md"


@dataclass(frozen=True)
class Step:
    """A question whose one answer ends the walk and whose other goes on.

    Attributes:
        question: With a question mark.
        command: That answers it.
        answer: yes or no, the one that ends the walk.
        outcome: What to do then.
        way: The command or flag for that.
    """

    question: str
    command: str
    answer: str
    outcome: str
    way: str

    @property
    def other(self) -> str:
        return "no" if self.answer == "yes" else "yes"


STEPS = (
    Step(
        "Scales for every layer, none suspicious?",
        "vllm kv-scales inspect MODEL",
        "yes",
        "Is 'made for' right? Else correct fp8_dtype_flavor. Serve.",
        "--kv-cache-dtype fp8_inc",
    ),
    Step(
        "Has INC calibrated it?",
        "vllm kv-scales inspect FOLDER",
        "yes",
        "Serve with that folder.",
        "QUANT_CONFIG=FILE --kv-cache-dtype fp8_inc",
    ),
    Step(
        "Are there texts like your traffic?",
        "vllm kv-scales calibrate MODEL",
        "no",
        "Keep the cache in bf16.",
        "--kv-cache-dtype auto",
    ),
    Step(
        "Calibrated: is it worse than bf16?",
        "vllm kv-scales compare OUT --text FILE",
        "no",
        "Serve what calibrate wrote.",
        "--kv-cache-dtype fp8_inc",
    ),
    Step(
        "MHA or GQA with one scale a tensor?",
        "vllm kv-scales inspect OUT",
        "yes",
        "Calibrate a scale a head, and compare again.",
        "--granularity head",
    ),
)
LAST = ("Calibrate by the error of attention; if it stays worse, bf16.", "--method mse")

_WIDE, _HIGH, _GAP, _LEFT, _RIGHT = 330, 58, 40, 10, 440
_STYLE = (
    "text{font:13px sans-serif;fill:#111}.c{font:12px monospace;fill:#333}"
    ".q{fill:#e8f1f8;stroke:#0072B2}.o{fill:#e6f4ee;stroke:#009E73}"
    "line{stroke:#444;stroke-width:1.5;marker-end:url(#a)}"
)


def _box(x: int, y: int, kind: str, text: str, command: str, wide: int) -> str:
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{wide}" height="{_HIGH}" rx="8"/>'
        f'<text x="{x + 12}" y="{y + 24}">{escape(text)}</text>'
        f'<text class="c" x="{x + 12}" y="{y + 44}">{escape(command)}</text>'
    )


def svg() -> str:
    """Questions on the left, outcomes on the right."""
    wide, high = _RIGHT + 410, len(STEPS) * (_HIGH + _GAP) + _HIGH + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        f'width="{wide}" height="{high}" role="img">',
        "<title>Which FP8 KV cache</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#444"/></marker>'
        "</defs>",
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
    ]
    for n, step in enumerate(STEPS):
        y = 10 + n * (_HIGH + _GAP)
        middle, below, down = y + _HIGH // 2, y + _HIGH, _LEFT + 60
        parts += [
            _box(_LEFT, y, "q", step.question, step.command, _WIDE),
            _box(_RIGHT, y, "o", step.outcome, step.way, 400),
            f'<line x1="{_LEFT + _WIDE}" y1="{middle}" x2="{_RIGHT}" y2="{middle}"/>',
            f'<text x="{_LEFT + _WIDE + 35}" y="{middle - 6}">{step.answer}</text>',
            f'<line x1="{down}" y1="{below}" x2="{down}" y2="{below + _GAP}"/>',
            f'<text x="{down + 10}" y="{below + 25}">{step.other}</text>',
        ]
    y = 10 + len(STEPS) * (_HIGH + _GAP)
    parts.append(_box(_LEFT, y, "o", *LAST, 400))
    return "\n".join([*parts, "</svg>", ""])


def text() -> str:
    """The same as a numbered list."""
    lines = []
    for n, step in enumerate(STEPS, 1):
        lines.append(
            f"{n}. **{step.question}** (`{step.command}`) {step.answer}: "
            f"{step.outcome} `{step.way}`. {step.other}: go on."
        )
    lines.append(f"{len(STEPS) + 1}. {LAST[0]} `{LAST[1]}`")
    return "\n".join(lines)


def main() -> None:
    """Writes the picture and the list."""
    SVG.parent.mkdir(parents=True, exist_ok=True)
    SVG.write_text(svg())
    write_between(PAGE, "chart", text())


if __name__ == "__main__":
    main()
