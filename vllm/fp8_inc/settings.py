# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a user sets under ``--additional-config '{"fp8_inc": {...}}'``."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm.fp8_inc.formats import FORMATS, Fp8Format
from vllm.fp8_inc.validation import wrong_entries

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Settings(BaseModel):
    """The options of the FP8 KV cache.

    Attributes:
        device: The Gaudi whose numbers a CPU computes with.
        missing_scales: What to do where a checkpoint declares a KV scheme and
            lacks scales: stop ("error") or use dequant_scale 1.0 ("unit").
        legacy_scales: Path of a JSON in the form of --quantization-param-path,
            whose scales replace the checkpoint's.
        hpu_matmul: On HPU, the dtype of the two matrix products of attention: "fp8",
            or "bf16", which is more accurate and moves more bytes (docs/hpu.md).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["gaudi2", "gaudi3"] = "gaudi3"
    missing_scales: Literal["error", "unit"] = "error"
    legacy_scales: Annotated[str, Field(min_length=1)] | None = None
    hpu_matmul: Literal["fp8", "bf16"] = "fp8"

    @property
    def format(self) -> Fp8Format:
        """The number format of the device."""
        return FORMATS[self.device]

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "Settings":
        """Reads and checks the options of a vLLM configuration.

        Raises:
            ValueError: Naming the key and the value that is not allowed.
        """
        from vllm.fp8_inc.hpu_worker import is_hpu

        config = vllm_config.additional_config
        options = config.get("fp8_inc", {}) if isinstance(config, dict) else {}
        try:
            settings = cls.model_validate(options)
        except ValidationError as error:
            raise ValueError(
                '--additional-config {"fp8_inc": ...}: '
                f"{wrong_entries(error, 'fp8_inc')}"
            ) from None
        return settings._on_hpu() if is_hpu() else settings

    def _on_hpu(self) -> "Settings":
        """The device is the one that is there; a wish for another is an error."""
        from vllm.fp8_inc.hpu_device import hpu_format

        device = hpu_format().name
        if "device" in self.model_fields_set and self.device != device:
            raise ValueError(
                f'--additional-config {{"fp8_inc": {{"device": "{self.device}"}}}}: '
                f"this is a {device}; leave the key out, it is for CPUs"
            )
        return self.model_copy(update={"device": device})
