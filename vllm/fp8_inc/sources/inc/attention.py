# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The scales of attention layers, and which layers keep a bf16 cache."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm.fp8_inc.scales import check_dequant_scale
from vllm.fp8_inc.sources.inc.node_scales import NodeScales
from vllm.fp8_inc.sources.inc.nodes import (
    AttentionNode,
    IncRole,
    match_attention,
)
from vllm.fp8_inc.sources.inc.schema import QuantConfig
from vllm.fp8_inc.sources.store import FoundScale
from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True)
class _Member:
    """A module of one layer, with its scales."""

    path: str
    node: AttentionNode
    scales: NodeScales


def attention_scales(
    config: QuantConfig, nodes: Mapping[str, NodeScales], where: str
) -> tuple[dict[str, dict[IncRole, FoundScale]], set[str]]:
    """Sorts the scales of attention modules by layer and role.

    Args:
        config: Its lists say which modules are quantised.
        nodes: Path -> scales.
        where: The files, for messages.

    Returns:
        Layer -> role -> scale, for layers whose cache is quantised; and the layers
        whose cache is not.

    Raises:
        ValueError: For a scale that cannot act, a layer of which only K or V is
            quantised, or one without measurements of its cache.
    """
    attention: dict[str, dict[IncRole, FoundScale]] = {}
    excluded = set()
    for layer, members in _by_layer(nodes, where).items():
        quantised = [m for m in members if config.quantises(m.path, m.node.type)]
        if _caches_quantised(config, layer, members, quantised, where):
            attention[layer] = _roles(quantised, where)
        else:
            excluded.add(layer)
    return attention, excluded


def _by_layer(nodes: Mapping[str, NodeScales], where: str) -> dict[str, list[_Member]]:
    layers: dict[str, list[_Member]] = defaultdict(list)
    nobodys = []
    for path, scales in nodes.items():
        found = match_attention(path)
        if found is None:
            continue
        if found.layer:
            layers[found.layer].append(_Member(path, found.node, scales))
        elif found.node.is_cache:
            nobodys.append(path)
    if nobodys:
        logger.warning_once(
            "fp8_inc: %s: %d caches are in no attention layer that is known, and are "
            "ignored (%s)",
            where,
            len(nobodys),
            nobodys[0],
        )
    return layers


def _caches_quantised(
    config: QuantConfig,
    layer: str,
    members: list[_Member],
    quantised: list[_Member],
    where: str,
) -> bool:
    """Whether the cache of ``layer`` is FP8; K and V go together."""
    caches = {m.path for m in members if m.node.is_cache}
    kept = {m.path for m in quantised if m.node.is_cache}
    if not caches:
        return _refuse_unmeasured(config, layer, members, where)
    if kept and kept != caches:
        raise ValueError(
            f"{where}: allowlist and blocklist leave {sorted(kept)} of {layer} to be "
            f"quantised and {sorted(caches - kept)} not, but K and V share a format; "
            "list both or neither"
        )
    return bool(kept)


def _refuse_unmeasured(
    config: QuantConfig, layer: str, members: list[_Member], where: str
) -> bool:
    parent = members[0].path.rpartition(".")[0]
    blocked = not any(
        config.quantises(f"{parent}.{name}", "VLLMKVCache")
        for name in ("k_cache", "latent_cache_k")
    )
    if blocked or config.ignore_modules_wo_measures:
        return False
    raise ValueError(
        f"{where}: {layer} has {members[0].path}, but no k_cache or latent_cache_k: "
        "its cache was not measured. Calibrate with the lists with which you serve, or "
        'set "ignore_modules_wo_measures": true to keep it in bf16'
    )


def _roles(members: list[_Member], where: str) -> dict[IncRole, FoundScale]:
    is_mla = any("latent" in m.node.inputs for m in members)
    roles: dict[IncRole, FoundScale] = {}
    for member in members:
        if is_mla and member.node.inputs in (("k",), ("v",)):
            continue  # vllm-gaudi's MLA modules have K and V caches that nobody uses
        for name, value in zip(member.node.inputs, member.scales.inputs):
            for role in _roles_of(name, is_mla):
                _check(value, member.path, role, where)
                known = roles.get(role)
                if known is None or known.dequant_scale < value:
                    roles[role] = FoundScale(member.path, value)
    return roles


def _roles_of(name: str | None, is_mla: bool) -> Iterator[IncRole]:
    if name == "latent":
        yield from ("k", "v")
    elif name == "decode":
        yield "q_latent" if is_mla else "q_decode"
    elif name:
        yield name  # type: ignore[misc]


def _check(value: float, path: str, role: str, where: str) -> None:
    try:
        check_dequant_scale(value)
    except ValueError as error:
        why = "was never visited (amax 0)" if value == 0 else f"{role} {error}"
        raise ValueError(
            f"{where}: {path} {why}. Calibrate again with more samples"
        ) from None
