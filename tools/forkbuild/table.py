# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The table of patches in the READMEs, made from the patches' headers."""

from pathlib import Path

from forkbuild.fork import ForkError
from forkbuild.patchset import Patch

BEGIN = "<!-- patches:begin -->"
END = "<!-- patches:end -->"


def render_table(patches: list[Patch], base: Path) -> str:
    """The table in Markdown; links are relative to the folder `base`."""
    rows = [
        "| Patch | Changes | Lines | Kind | Forwarded | Dropped when |",
        "|---|---|---|---|---|---|",
    ]
    for patch in patches:
        fields = {key: text.replace("|", "\\|") for key, text in patch.fields.items()}
        link = patch.path.relative_to(base).as_posix()
        rows.append(
            f"| [{fields['Subject']}]({link}) | `{patch.target}` | {patch.changed} "
            f"| {fields['Kind']} | {fields['Forwarded']} | {fields['Drop-When']} |"
        )
    lines = sum(patch.changed for patch in patches)
    rows += ["", f"{len(patches)} patches, {lines} changed lines."]
    return "\n".join(rows)


def with_table(text: str, table: str, label: str) -> str:
    """A README's text with the table between its two markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ForkError(f"{label}: no lines {BEGIN} and {END} to put the table between")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def stale_readmes(root: Path, patches: list[Patch]) -> dict[Path, str]:
    """The READMEs whose table is not current, with the text that they should have.

    patches/README.md must have the markers; the top README.md may have them.
    """
    result = {}
    for path in (root / "patches" / "README.md", root / "README.md"):
        label = path.relative_to(root).as_posix()
        if not path.is_file():
            if path.parent == root:
                continue
            raise ForkError(f"{label}: missing")
        text = path.read_text("utf-8")
        if path.parent == root and BEGIN not in text:
            continue
        fresh = with_table(text, render_table(patches, path.parent), label)
        if fresh != text:
            result[path] = fresh
    return result
