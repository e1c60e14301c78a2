# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The JSON that QUANT_CONFIG names: every key, its values, its default.

Names, defaults and case rules are those of INC's parser (quant_config.py of
neural-compressor-pt 3.10). What INC takes and then does something else with is an
error here: see docs/inc.md.
"""

import re
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vllm.fp8_inc.sources.inc.rules import UPPER, Scheme
from vllm.fp8_inc.sources.inc.scheme_table import SchemeTable


def _boolean(value: Any) -> Any:
    """INC takes true, false and these words in any case, and nothing else."""
    words = {"TRUE": True, "FALSE": False}
    return words.get(value.upper(), value) if isinstance(value, str) else value


Boolean = Annotated[StrictBool, BeforeValidator(_boolean)]
_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
_OLD_NAMES = {"whitelist": "allowlist", "blacklist": "blocklist"}


class ModuleList(BaseModel):
    """Modules by class and by name.

    Attributes:
        types: Exact class names.
        names: Regular expressions, searched for in the module's path.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    types: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @field_validator("types", "names", mode="before")
    @classmethod
    def _no_string(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            raise ValueError(
                f"INC reads a string character by character and so matches nearly "
                f'every module; write a list, "{info.field_name}": [{value!r}]'
            )
        return value

    @field_validator("names")
    @classmethod
    def _compiles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(
                    f"{name!r} is no regular expression ({error}); escape its special "
                    'characters, as "mlp\\\\.gate\\\\b" does'
                ) from None
        return value

    @property
    def is_empty(self) -> bool:
        """Whether it lists nothing."""
        return not self.types and not self.names

    def lists(self, path: str, module_type: str | None) -> bool:
        """Whether it lists the module; a type of None is in no list of types."""
        return module_type in self.types or self.names_match(path)

    def names_match(self, path: str) -> bool:
        """Whether a name is found in ``path``."""
        return any(re.search(name, path) for name in self.names)


class QuantConfig(BaseModel):
    """A configuration of INC's FP8 quantisation.

    Attributes whose meaning is not their name: ``observer`` and ``dump_stats_path``
    make the names of the files (see ``files``); ``device_for_scales`` is the device
    whose scales are computed; ``method`` and ``quantize_weight`` stand in the
    configurations of Intel's calibration scripts and have no effect.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    mode: Annotated[Literal["QUANTIZE", "MEASURE", "NONE", "SHAPE", "LOAD"], UPPER] = (
        "QUANTIZE"
    )
    observer: Literal["maxabs", "maxabs_per_channel", "shape", "save"] = "maxabs"
    dump_stats_path: str = "stats"
    scale_method: SchemeTable = SchemeTable.model_validate("MAXABS_HW")
    scale_params: dict[str, Any] = {}
    scale_format: Annotated[Literal["SCALAR", "CONST"], UPPER] = "SCALAR"
    fp8_config: Annotated[Literal["E4M3", "E5M2"], UPPER] = "E4M3"
    hp_dtype: Annotated[Literal["BF16", "FP16", "FP32"], UPPER] = "BF16"
    device_for_scales: Annotated[Literal["GAUDI2", "GAUDI3"], UPPER] | None = None
    measure_exclude: Annotated[
        Literal["NONE", "INPUT", "OUTPUT", "PARAMS", "ALL"], UPPER
    ] = "OUTPUT"
    use_qdq: Boolean = False
    fake_quant: Boolean = False
    recalc_scales: Boolean = False
    ignore_modules_wo_measures: Boolean = False
    dynamic_quantization: Boolean = False
    measure_on_hpu: Boolean = True
    seperate_measure_files: StrictBool = True
    row_parallel_linear_allreduce_quantization: StrictBool = False
    calibration_sample_interval: Annotated[StrictInt, Field(ge=0)] = 0
    mod_dict: Annotated[dict[str, Any], Field(max_length=0)] = {}
    allowlist: ModuleList = ModuleList()
    blocklist: ModuleList = ModuleList()
    method: Any = None
    quantize_weight: Any = None

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        renamed = dict(content)
        for old, new in _OLD_NAMES.items():
            if old in renamed and new in renamed:
                raise ValueError(f"{old} is the old name of {new}: keep one of them")
            if old in renamed:
                renamed[new] = renamed.pop(old)
        return renamed

    @model_validator(mode="after")
    def _check_dynamic(self) -> "QuantConfig":
        table = self.scale_method
        if not self.dynamic_quantization:
            if table.dynamic_only:
                raise ValueError(
                    f"scale_method {table.dynamic_only} works with "
                    '"dynamic_quantization": true only; for a calibrated cache take '
                    '"maxabs_hw"'
                )
            return self
        if self.mode not in ("QUANTIZE", "LOAD"):
            raise ValueError(
                f'"dynamic_quantization" together with "mode": "{self.mode}": a '
                "dynamic method measures nothing; remove one of the two"
            )
        for other in (
            "use_qdq",
            "fake_quant",
            "row_parallel_linear_allreduce_quantization",
        ):
            if getattr(self, other):
                raise ValueError(f'"dynamic_quantization" excludes "{other}"')
        if table.excludes_dynamic:
            raise ValueError(
                f"scale_method {table.excludes_dynamic} is static: remove "
                '"dynamic_quantization"'
            )
        return self

    @model_validator(mode="after")
    def _check_path(self) -> "QuantConfig":
        if self.uses_files and "/" not in self.dump_stats_path:
            raise ValueError(
                f"dump_stats_path is {self.dump_stats_path!r} and names no folder; "
                f'write "./{self.dump_stats_path}" for the folder where the server '
                "is started, or an absolute path"
            )
        return self

    @property
    def uses_files(self) -> bool:
        """Whether scales come from measurements or cached scale files."""
        return not (self.dynamic_quantization or self.scale_method.is_fixed)

    @property
    def dtype(self) -> torch.dtype:
        """hp_dtype, in which INC computes scales."""
        return _DTYPES[self.hp_dtype]

    @property
    def recomputes(self) -> bool:
        """Whether cached scale files are passed over."""
        return self.recalc_scales or self.scale_method.is_written_out

    def scheme_of(self, path: str, module_type: str | None) -> Scheme:
        """The rules of one module."""
        return self.scale_method.scheme_of(path, module_type)

    def quantises(self, path: str, module_type: str | None) -> bool:
        """Whether allowlist and blocklist leave the module to be quantised.

        Args:
            path: Of the module in the model.
            module_type: Its class name. None where it is not known: then only names
                of the blocklist, and an allowlist, can rule it out.
        """
        if self.blocklist.lists(path, module_type):
            return False
        return self.allowlist.is_empty or self.allowlist.lists(path, module_type)

    def unknown_keys(self) -> list[str]:
        """Names the keys that INC does not have, dotted."""
        parts: dict[str, BaseModel] = {
            "": self,
            "allowlist.": self.allowlist,
            "blocklist.": self.blocklist,
        }
        found = [
            prefix + key
            for prefix, part in parts.items()
            for key in part.model_extra or ()
        ]
        return sorted(found + self.scale_method.unknown_keys("scale_method"))
