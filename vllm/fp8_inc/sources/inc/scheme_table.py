# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The value of ``scale_method``: a method, or rules by node, layer and layer type."""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm.fp8_inc.sources.inc.rules import (
    DYNAMIC_ONLY,
    METHODS,
    ScaleRule,
    Scheme,
    method_of,
)

_LAYER = re.compile(r"layers[./]([0-9]+)")
_SECTIONS = ("nodes", "layers", "layer_types")


class Entry(BaseModel):
    """The rules of some modules, as they are written.

    What an entry of a section leaves out is as in ``default``; what ``default``
    leaves out is as in ``ScaleRule`` (a backoff of 1, not of 0.25).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    weight: ScaleRule = ScaleRule()
    activation: ScaleRule = ScaleRule()

    def over(self, default: "Entry") -> Scheme:
        """The rules, with those of ``default`` where nothing is written."""
        return Scheme(
            _over(self.weight, default.weight),
            _over(self.activation, default.activation),
        )


def _over(rule: ScaleRule, default: ScaleRule) -> ScaleRule:
    return default.model_copy(update=rule.model_dump(exclude_unset=True))


class SchemeTable(BaseModel):
    """Which rules each module follows.

    Attributes:
        default: For modules that no section names.
        nodes: By exact path; goes before the other sections.
        layers: By layer number.
        layer_types: By class name.
        is_written_out: Whether it was an object. INC then passes over cached scales.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    default: Entry
    nodes: dict[str, Entry] = {}
    layers: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]*)$")], Entry] = {}
    layer_types: dict[str, Entry] = {}
    is_written_out: bool = True

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value.upper() not in METHODS:
                raise ValueError(f"INC has the methods {', '.join(METHODS)}")
            scheme = METHODS[value.upper()]
            entry = {"weight": scheme.weight, "activation": scheme.activation}
            return {"default": entry, "is_written_out": False}
        if isinstance(value, dict) and "is_written_out" in value:
            raise ValueError("is_written_out is no key of scale_method")
        return value

    @model_validator(mode="after")
    def _check_kinds(self) -> "SchemeTable":
        for where, scheme in self._schemes():
            if method_of(scheme) is None:
                raise ValueError(
                    f"{where}: weight {scheme.weight.kind} with activation "
                    f"{scheme.activation.kind} is none of INC's methods; take the "
                    f"pair of one of {', '.join(METHODS)}"
                )
        return self

    @property
    def method(self) -> str:
        """The name of ``default``'s method, which file names carry."""
        name = method_of(self._default_scheme)
        assert name is not None  # _check_kinds
        return name

    @property
    def is_fixed(self) -> bool:
        """Whether no module needs a measurement."""
        return all(scheme.is_fixed for _, scheme in self._schemes())

    @property
    def dynamic_only(self) -> str | None:
        """A method in it that exists for dynamic quantisation only."""
        names = (method_of(scheme) for _, scheme in self._schemes())
        return next((name for name in names if name in DYNAMIC_ONLY), None)

    @property
    def excludes_dynamic(self) -> str | None:
        """A method in it that dynamic quantisation cannot have."""
        for _, scheme in self._schemes():
            if scheme.is_fixed or scheme.activation.rounding_method == "HW_ALIGNED":
                return method_of(scheme)
        return None

    def scheme_of(self, path: str, module_type: str | None) -> Scheme:
        """The rules of one module, in INC's order: node, layer, type, default."""
        found = self.nodes.get(path)
        layer = _LAYER.search(path)
        if found is None and layer:
            found = self.layers.get(layer[1])
        if found is None and module_type:
            found = self.layer_types.get(module_type)
        return found.over(self.default) if found else self._default_scheme

    @cached_property
    def _default_scheme(self) -> Scheme:
        return self.default.over(Entry())

    def unknown_keys(self, name: str) -> list[str]:
        """Names the keys that INC does not read, dotted, below ``name``."""
        keys = [f"{name}.{key}" for key in self.model_extra or ()]
        for where, entry in self._entries():
            keys += [f"{name}.{where}.{key}" for key in entry.model_extra or ()]
            for part in ("weight", "activation"):
                extra = getattr(entry, part).model_extra or ()
                keys += [f"{name}.{where}.{part}.{key}" for key in extra]
        return keys

    def _entries(self) -> Iterator[tuple[str, Entry]]:
        yield "default", self.default
        for section in _SECTIONS:
            for key, entry in getattr(self, section).items():
                yield f"{section}.{key}", entry

    def _schemes(self) -> Iterator[tuple[str, Scheme]]:
        for where, entry in self._entries():
            base = Entry() if where == "default" else self.default
            yield where, entry.over(base)
