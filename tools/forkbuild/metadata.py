# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The wheel's metadata: upstream's, with the changes that pyproject.toml lists.

They are edited as lines of text, so that what is not named there stays as it is.
"""

from configparser import ConfigParser
from io import StringIO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forkbuild.fork import Fork, ForkError


def edit_metadata(fork: Fork, device: str, upstream: str) -> str:
    """Turns upstream's METADATA into the fork's.

    Args:
        fork: Its settings name the changes.
        device: `cpu` or `gaudi`; some requirements depend on it.
        upstream: The text of upstream's METADATA.

    Raises:
        ForkError: pyproject.toml changes a requirement that upstream does not have,
            or adds an extra that it has.
    """
    settings = fork.settings
    headers, _, _ = upstream.partition("\n\n")
    replaced = {
        "Name": "vllm",
        "Version": fork.version(device),
        "Summary": settings["summary"],
        "Requires-Python": settings["requires-python"],
    }
    dropped = {*settings["drop-headers"], "Description-Content-Type"}
    result: list[str] = []
    requirements: list[str] = []
    extras: list[str] = []
    for key, value in _fields(headers):
        if key == "Requires-Dist":
            requirements.append(value)
        elif key == "Provides-Extra":
            extras.append(value)
        elif key not in dropped:
            result.append(f"{key}: {replaced.get(key, value)}")
    result.append("License-File: NOTICE")
    core, optional = _edit_requirements(requirements, settings, device)
    result += [f"Requires-Dist: {line}" for line in core]
    for extra in _all_extras(extras, settings):
        result.append(f"Provides-Extra: {extra}")
        result += [f"Requires-Dist: {line}" for line in optional.get(extra, [])]
    return "\n".join(result) + "\n"


def edit_entry_points(fork: Fork, upstream: str) -> str:
    """Adds pyproject.toml's entry points to upstream's entry_points.txt."""
    parser = ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # names are case-sensitive
    parser.read_string(upstream)
    for group, entries in fork.settings["entry-points"].items():
        if not parser.has_section(group):
            parser.add_section(group)
        for name, target in entries.items():
            if parser.has_option(group, name):
                raise ForkError(f"upstream has an entry point {name} in {group} too")
            parser.set(group, name, target)
    text = StringIO()
    parser.write(text)
    return text.getvalue()


def wheel_file(tags: str, *, pure: bool) -> str:
    """The text of WHEEL for tags such as `cp38-abi3-manylinux_2_28_x86_64`."""
    python, abi, platform = tags.split("-")
    rows = ["Wheel-Version: 1.0", "Generator: forkbuild"]
    rows.append(f"Root-Is-Purelib: {'true' if pure else 'false'}")
    rows += [f"Tag: {python}-{abi}-{part}" for part in platform.split(".")]
    return "\n".join(rows) + "\n"


def _fields(headers: str) -> list[tuple[str, str]]:
    """Header fields in order; a continued line stays part of its value."""
    result: list[tuple[str, str]] = []
    for line in headers.split("\n"):
        if line[:1] in (" ", "\t"):
            result[-1] = (result[-1][0], f"{result[-1][1]}\n{line}")
        else:
            key, _, value = line.partition(": ")
            result.append((key, value))
    return result


def _edit_requirements(lines: list[str], settings: dict, device: str):
    """Returns the requirements and, by extra, those of the extras."""
    replace = settings["replace"] | settings.get(f"replace-{device}", {})
    moved = {
        name: extra
        for extra, names in settings["move-to-extra"].items()
        for name in names
    }
    seen: set[str] = set()
    core: list[str] = []
    optional: dict[str, list[str]] = {}
    for line in lines:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        extra = _extra_of(requirement)
        if extra is not None:
            optional.setdefault(extra, []).append(line)
        elif name in moved:
            optional.setdefault(moved[name], []).append(_in_extra(line, moved[name]))
        elif name not in replace:
            core.append(line)
        elif name not in seen:
            core += replace[name]
        if extra is None:
            seen.add(name)
    for name in [*replace, *moved]:
        if name not in seen:
            raise ForkError(
                f"pyproject.toml, [tool.fork]: upstream does not require {name} any "
                "more; delete the line that changes it"
            )
    for extra, extra_lines in settings["extras"].items():
        if extra in optional:
            raise ForkError(f"pyproject.toml, [tool.fork.extras]: upstream has {extra}")
        optional[extra] = [_in_extra(line, extra) for line in extra_lines]
    return core, optional


def _all_extras(upstream: list[str], settings: dict) -> list[str]:
    ours = [*settings["move-to-extra"], *settings["extras"]]
    return upstream + [extra for extra in ours if extra not in upstream]


def _extra_of(requirement: Requirement) -> str | None:
    """The extra that a requirement belongs to (upstream writes `extra == "name"`)."""
    _, found, rest = str(requirement.marker or "").partition('extra == "')
    return rest.partition('"')[0] if found else None


def _in_extra(line: str, extra: str) -> str:
    condition = f'extra == "{extra}"'
    spec, _, marker = (part.strip() for part in line.partition(";"))
    return f"{spec}; ({marker}) and {condition}" if marker else f"{spec}; {condition}"
