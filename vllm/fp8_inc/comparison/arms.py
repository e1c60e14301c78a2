# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Ways to serve one checkpoint that differ in the cache alone."""

import json
from pathlib import Path
from typing import Any

from vllm.fp8_inc.adjustment import FLAVOR_OF
from vllm.fp8_inc.report import UsageError
from vllm.fp8_inc.sources.checkpoint import layer_index
from vllm.fp8_inc.sources.folder import Folder

REFERENCE = "bf16"
_KNOWN = {
    REFERENCE: "a cache that is not quantised",
    "fp8-unit": "dequant_scale 1.0",
    "fp8-loaded": "the scales of the checkpoint",
}
_NOT_SERVED = "fp8-dynamic"


def parse_arms(text: str) -> list[str]:
    """The arms of a comma-separated list, the reference first.

    Raises:
        UsageError: For an arm that is not known, twice there, or without reference.
    """
    arms = [arm.strip() for arm in text.split(",") if arm.strip()]
    for arm in arms:
        if arm == _NOT_SERVED:
            raise UsageError(f"--arms {arm}: fp8_inc has static scales only")
        if arm not in _KNOWN:
            raise UsageError(f"--arms {arm}: known are {', '.join(_KNOWN)}")
    if len(set(arms)) != len(arms) or arms[:1] != [REFERENCE] or len(arms) < 2:
        raise UsageError(f"--arms {text}: {REFERENCE} first, then others, each once")
    return arms


def arm_options(arm: str, folder: Folder, device: str, scratch: Path) -> dict[str, Any]:
    """The engine options that make an arm.

    Args:
        arm: Its name.
        folder: The checkpoint.
        device: gaudi2 or gaudi3.
        scratch: A folder for a file that the engine reads.
    """
    # The reference has the device as well: FP8 weights compute with its numbers.
    options = {"device": device}
    if arm == "fp8-unit":
        options["legacy_scales"] = str(_unit_scales(folder, device, scratch))
    cache = "auto" if arm == REFERENCE else "fp8_inc"
    return {"kv_cache_dtype": cache, "additional_config": {"fp8_inc": options}}


def _unit_scales(folder: Folder, device: str, scratch: Path) -> Path:
    """A legacy JSON takes the place of whatever the checkpoint has."""
    ones = {str(layer_index(layer)): 1.0 for layer in folder.attention_layers}
    cache = {"dtype": FLAVOR_OF[device], "scaling_factor": {"0": ones}}
    path = scratch / f"unit-scales-{device}.json"
    path.write_text(json.dumps({"kv_cache": cache}))
    return path
