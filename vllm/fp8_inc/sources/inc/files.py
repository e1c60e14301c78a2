# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Finds and reads the files that INC writes; only JSON, nothing is unpickled.

``{dump_stats_path}_hooks_{observer}[_{METHOD}][_{rank}_{world size}].json``: with a
method it holds scales, without one it holds measurements. INC itself reads the .npz
beside it, a pickled dict of the same values.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from vllm.fp8_inc.sources.inc.nodes import uses_outputs
from vllm.fp8_inc.sources.inc.schema import QuantConfig
from vllm.fp8_inc.sources.strict_json import parse_strict_json, read_text
from vllm.fp8_inc.validation import shown

_MOST = sys.float_info.max  # a JSON integer may be larger
_LARGEST = 1 << 30  # bytes; a file of 256 experts in 61 layers has some 30 MB
_EXPORT = (
    "INC writes a .json beside every .npz; copy it too, or export it where the file "
    "is trusted: python -c 'import json, sys, numpy; d = numpy.load(sys.argv[1], "
    'allow_pickle=True)["arr_0"].item(); json.dump(d, open(sys.argv[1][:-3] + "json", '
    '"w"), default=lambda a: a.tolist())\''
)


@dataclass(frozen=True)
class NodeRecord:
    """What a file has about one module, in each tensor one value or one per channel.

    Attributes:
        inputs: Largest magnitudes (a measurement) or dequant scales, by input.
        outputs: The same, by output, where INC uses them.
        weight: The same of its weight, or None where it has none.
    """

    inputs: tuple[tuple[float, ...], ...] = ()
    outputs: tuple[tuple[float, ...], ...] = ()
    weight: tuple[float, ...] | None = None


class _Node(BaseModel):
    """A module as it is written; ``input`` and ``output`` are old names."""

    inputs: list[Any] = Field([], validation_alias=AliasChoices("inputs", "input"))
    outputs: Any = Field(None, validation_alias=AliasChoices("outputs", "output"))
    params: dict[str, Any] | None = None

    def record(self, path: str) -> NodeRecord:
        outputs = []
        if uses_outputs(path):
            outputs = self.outputs if isinstance(self.outputs, list) else [self.outputs]
        weight = (self.params or {}).get("weight")
        if isinstance(weight, dict):  # per channel: scales of outputs, of inputs
            weight = weight.get("0")
        return NodeRecord(
            tuple(_flat(value) for value in self.inputs),
            tuple(_flat(value) for value in outputs if value is not None),
            None if weight is None else _flat(weight),
        )


def _flat(value: Any) -> tuple[float, ...]:
    """The numbers of nested lists."""
    numbers, left = [], [value]
    while left:
        part = left.pop()
        if isinstance(part, list) and part:
            left += reversed(part)
        elif type(part) not in (int, float) or not 0 <= part <= _MOST:
            raise ValueError(f"{shown(part)} is no positive finite number")
        else:
            numbers.append(float(part))
    return tuple(numbers)


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore")

    mode: str = Field(validation_alias="Mode")
    nodes: dict[str, Any] = Field(validation_alias="Nodes")


@dataclass(frozen=True)
class FoundFiles:
    """The files of one kind in a folder.

    Attributes:
        base: Their path up to the ranks.
        mode: What ``Mode`` must be in them.
        ranks: World size -> rank -> path. A file without ranks is (0, 1).
    """

    base: Path
    mode: str
    ranks: Mapping[int, Mapping[int, Path]]


def measurement_files(config: QuantConfig) -> FoundFiles:
    """Finds the measurements that ``config`` names."""
    return _find(config, config.observer, "DynamicRange")


def scale_files(config: QuantConfig) -> FoundFiles:
    """Finds the cached scales that ``config`` names."""
    name = f"{config.observer}_{config.scale_method.method}"
    return _find(config, name, "Scale")


def read_nodes(
    path: Path, mode: str, wanted: Callable[[str], bool] | None = None
) -> dict[str, NodeRecord]:
    """Reads a file of measurements or scales.

    Args:
        path: The file.
        mode: What its ``Mode`` must be.
        wanted: Which modules to read; None: all.

    Raises:
        ValueError: Naming the file and what is wrong; for a .npz without a .json.
    """
    if path.suffix == ".npz":
        raise ValueError(
            f"{path} is there without its JSON and is not read: loading it would run "
            f"whatever code it holds. {_EXPORT}"
        )
    name: str = "the file"
    try:
        content = parse_strict_json(read_text(path, _LARGEST))
        document = _Document.model_validate(content)
        records = {}
        for name, node in document.nodes.items():
            if wanted is None or wanted(name):
                records[name] = _Node.model_validate(node).record(name)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join([name, *map(str, first["loc"])])
        raise ValueError(
            f"{path}: {key}: {first['msg']}. INC writes "
            '{"Mode": ..., "Nodes": {path: {"inputs": ...}}}; calibrate again'
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {name}: {error}. Calibrate again") from None
    if document.mode != mode:
        raise ValueError(
            f'{path}: "Mode" is {document.mode!r}, but a file of this name has '
            f"{mode!r}: was it renamed? Calibrate again"
        )
    return records


def expected(config: QuantConfig, base: Path) -> str:
    """Says where files were looked for, for an error message."""
    folder = base.parent
    where = f"{base}[_RANK_WORLDSIZE].json"
    if config.dump_stats_path.startswith("/"):
        return where
    return (
        f"{where} (dump_stats_path {config.dump_stats_path!r} is relative to the "
        f"folder where the server is started, so this is {folder.absolute()})"
    )


def _find(config: QuantConfig, name: str, mode: str) -> FoundFiles:
    base = Path(f"{config.dump_stats_path}_hooks_{name}")
    ranks: dict[int, dict[int, Path]] = defaultdict(dict)
    # By size: _0_1 replaces a file without ranks.
    for rank, size, path in sorted(_matches(base), key=lambda match: match[1::-1]):
        if config.seperate_measure_files or size == 0:
            ranks[size or 1][rank] = path
    return FoundFiles(base, mode, ranks)


def _matches(base: Path) -> Iterator[tuple[int, int, Path]]:
    """Rank, world size (0: not in the name) and path of each file."""
    pattern = re.compile(rf"{re.escape(base.name)}(?:_([0-9]+)_([0-9]+))?")
    if not base.parent.is_dir():
        return
    stems: dict[str, Path] = {}
    for path in sorted(base.parent.iterdir(), reverse=True):
        if path.suffix in (".json", ".npz"):
            stems[path.stem] = path  # .json sorts before .npz, so it comes last
    for stem, path in stems.items():
        if found := pattern.fullmatch(stem):
            rank, size = (int(number or 0) for number in found.groups())
            yield rank, size, path
