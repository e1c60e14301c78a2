# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What the start of a server says about its scales."""

from collections.abc import Mapping

from vllm.fp8_inc import hpu_worker
from vllm.fp8_inc.adjustment import Adjustment
from vllm.fp8_inc.sources.hints import implausible, rounded_to_bfloat16
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.store import FoundScale
from vllm.logger import init_logger

logger = init_logger(__name__)

# What the device does without a scale for it.
_INSTEAD: dict[Role, str] = {
    "q": "per token by amax",
    "q_latent": "per token by amax",
    "prob": "over the whole range",
}


def report_start(
    found: Mapping[str, Mapping[Role, FoundScale]],
    adjustment: Adjustment,
    *,
    source: str,
    layers: int,
    sharing: int,
    mla: bool,
    model: str,
) -> None:
    """Logs one line, and one more where the scales look odd.

    Args:
        found: Layer -> role -> scale, of the layers that have scales.
        adjustment: How they are fitted to the device.
        source: Who wrote them.
        layers: How many layers have an fp8_inc cache.
        sharing: How many of these read the cache of another layer.
        mla: Whether they cache a latent.
        model: The checkpoint, for the odd ones.
    """
    device = f"{adjustment.served_on.name} (max {adjustment.served_on.max:g})"
    if not found:
        logger.info(
            "fp8_inc: no KV scales in the checkpoint: dequant_scale 1.0 for all "
            "%d layers, served on %s",
            layers,
            device,
        )
        return
    logger.info(
        "fp8_inc: KV scales of %d of %d layers from %s%s%s; %s; made for %s (max %g; "
        "%s), served on %s: dequant scales x %.4g",
        len(found) + sharing,
        layers,
        source,
        _granularity(found, mla),
        f" ({sharing} layers share the cache of another)" if sharing else "",
        _other_roles(found, mla),
        adjustment.quantised_for.name,
        adjustment.quantised_for.max,
        adjustment.reason,
        device,
        adjustment.factor,
    )
    if adjustment.heads_for and any(scale.per_head for scale in _all(found)):
        logger.info(
            "fp8_inc: scales per head of AutoRound divide by %g whatever "
            "fp8_dtype_flavor says, and are taken so",
            adjustment.heads_for.max,
        )
    if odd := implausible(found):
        logger.warning_once("fp8_inc: %s: %s", model, odd)
    if rounded := rounded_to_bfloat16(found):
        logger.info_once("fp8_inc: %s: %s", model, rounded)


def _all(found: Mapping[str, Mapping[Role, FoundScale]]) -> list[FoundScale]:
    return [scale for roles in found.values() for scale in roles.values()]


def _granularity(found: Mapping[str, Mapping[Role, FoundScale]], mla: bool) -> str:
    kv = [roles[role] for roles in found.values() for role in ("k", "v")]
    per_head = any(scale.per_head for scale in kv)
    if mla:
        of_heads = ", and of all heads," if per_head else ""
        return f" (MLA: the larger of k and v{of_heads} for the latent)"
    return " per head" if per_head else ""


def _other_roles(found: Mapping[str, Mapping[Role, FoundScale]], mla: bool) -> str:
    """Says for q, q_latent and prob what acts on a device with FP8 matmuls."""
    words = []
    for role, instead in _INSTEAD.items():
        if role == "q_latent" and not mla:
            continue
        loaded = all(role in roles for roles in found.values())
        words.append(f"{role} {'loaded' if loaded else instead}")
    where = "" if hpu_worker.is_served_here() else " (not quantised on CPU)"
    return ", ".join(words) + where
