# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Scales that an operator gives beside a checkpoint, and that go before its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.store import FoundScale


@dataclass(frozen=True)
class ExternalScales:
    """The scales of one file or folder.

    Attributes:
        option: How it was named to vLLM: ``legacy_scales`` or ``QUANT_CONFIG``.
        path: The file, for error messages.
        source: Where they come from, for the report.
        key_of: Where the scales of a layer stand in the file, with {} for its number.
        found: Layer (``layers.N``) -> role -> scale.
        adjustment: From the device they were made for to the one that serves.
    """

    option: str
    path: str
    source: str
    key_of: str
    found: Mapping[str, Mapping[Role, FoundScale]]
    adjustment: Adjustment
