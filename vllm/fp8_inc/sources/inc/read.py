# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""QUANT_CONFIG in, the scales of one rank out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm.fp8_inc.sources.inc.attention import attention_scales
from vllm.fp8_inc.sources.inc.config_file import read_config
from vllm.fp8_inc.sources.inc.files import (
    FoundFiles,
    NodeRecord,
    expected,
    measurement_files,
    read_nodes,
    scale_files,
)
from vllm.fp8_inc.sources.inc.linears import (
    ExpertScales,
    LinearScales,
    expert_scales,
    linear_scales,
)
from vllm.fp8_inc.sources.inc.made_for import check_made_for
from vllm.fp8_inc.sources.inc.methods import fixed_scale
from vllm.fp8_inc.sources.inc.node_scales import (
    NodeScales,
    cached_scales,
    compute_scales,
)
from vllm.fp8_inc.sources.inc.nodes import ATTENTION_NODES, IncRole, match_attention
from vllm.fp8_inc.sources.inc.ranks import Ranks, choose_ranks, unify
from vllm.fp8_inc.sources.inc.schema import QuantConfig
from vllm.fp8_inc.sources.store import FoundScale
from vllm.logger import init_logger

logger = init_logger(__name__)

_SCALES, _MEASUREMENTS = "Scale", "DynamicRange"  # "Mode" of the files


@dataclass(frozen=True)
class IncScales:
    """What a configuration of INC and its files say for one rank.

    Every scale is a dequant scale, x = q * s and q = x / s, for ``device``: no
    adjustment between 240 and 448 is left to do.

    Attributes:
        path: The configuration.
        config: Its content.
        device: ``gaudi2`` or ``gaudi3``, whose full scale the scales fill.
        attention: ``layers.N`` -> role -> scale, for each layer with an FP8 cache
            that the files know. FoundScale.key is the path of the module.
        excluded: ``layers.N`` that the files know and that keep a bf16 cache; ask
            ``quantises_cache`` about a layer that they do not know.
        fixed: The dequant scale of every role of every layer, where scale_method
            needs no files, else None.
        linears: Path -> scales of a Linear layer.
        experts: Path of ``moe_op`` -> scales of a layer's experts.
        files: What was read.
        ranks: Whose values these are, for the report.
    """

    path: str
    config: QuantConfig
    device: str
    attention: Mapping[str, Mapping[IncRole, FoundScale]]
    excluded: frozenset[str]
    fixed: float | None
    linears: Mapping[str, LinearScales]
    experts: Mapping[str, ExpertScales]
    files: tuple[str, ...]
    ranks: str

    def quantises_cache(self, layer_name: str, is_mla: bool) -> bool:
        """Whether an attention layer's cache is FP8 by allowlist and blocklist.

        Args:
            layer_name: Of the model, as ``model.layers.3.self_attn.attn``.
            is_mla: Whether it caches a latent.

        Raises:
            ValueError: If the lists part K from V.
        """
        names = ("latent_cache_k",) if is_mla else ("k_cache", "v_cache")
        paths = [f"{layer_name}.impl.{name}" for name in names]
        answers = {self.quantises(path, "VLLMKVCache") for path in paths}
        if len(answers) > 1:
            raise ValueError(
                f"{self.path}: allowlist and blocklist part {' from '.join(paths)}, "
                "but K and V share a format; list both or neither"
            )
        return answers.pop()

    def quantises(self, path: str, module_type: str | None) -> bool:
        """Whether allowlist and blocklist leave a module to be quantised."""
        return self.config.quantises(path, module_type)


def read_inc_scales(
    path: str,
    device: str,
    tp_rank: int,
    tp_size: int,
    num_experts: int | None = None,
) -> IncScales:
    """Reads the scales of one tensor-parallel rank.

    Args:
        path: The JSON that QUANT_CONFIG names.
        device: ``gaudi2`` or ``gaudi3``, which serves.
        tp_rank: Rank of this worker.
        tp_size: Number of ranks.
        num_experts: Routed experts of the model, if it has any.

    Raises:
        ValueError: Naming file, layer, key and value, and the way out.
    """
    config = read_config(path)
    made_for = _device_for_scales(path, config, device)
    if not config.uses_files:
        return _without_files(path, config, made_for)
    kinds = [measurement_files(config)]
    if not config.recomputes:
        kinds.insert(0, scale_files(config))
    ranks = choose_ranks(kinds, tp_rank, tp_size)
    if ranks is None:
        looked_for = " nor ".join(expected(config, found.base) for found in kinds)
        raise ValueError(
            f"{path}: there is neither {looked_for}. Calibrate, or name the folder of "
            "the calibration in dump_stats_path"
        )
    read = {
        rank: _read_rank(config, made_for, kinds, ranks.made_on, rank)
        for rank in ranks.read
    }
    per_rank = {rank: scales for rank, (scales, _) in read.items()}
    files = tuple(file for _, files in read.values() for file in files)
    where = files[0]
    nodes = unify(per_rank)
    _check_latents(config, made_for, kinds, ranks, per_rank)
    _warn_unused_nodes(path, config, nodes)
    attention, excluded = attention_scales(config, nodes, where)
    return IncScales(
        path,
        config,
        made_for,
        attention,
        frozenset(excluded),
        None,
        linear_scales(config, nodes, where),
        expert_scales(config, per_rank, ranks.made_on, num_experts, where),
        files,
        str(ranks),
    )


def _device_for_scales(path: str, config: QuantConfig, device: str) -> str:
    wanted = (config.device_for_scales or device).lower()
    if wanted == device:
        return device
    if (wanted, device) != ("gaudi2", "gaudi3"):
        raise ValueError(
            f'{path}: "device_for_scales": "{config.device_for_scales}" on {device}: '
            "only Gaudi2's scales work on the other device; remove the key"
        )
    if config.scale_method.method != "MAXABS_HW" or config.scale_method.is_written_out:
        raise ValueError(
            f'{path}: "device_for_scales" of another device needs "scale_method": '
            f'"maxabs_hw", which is {config.scale_method.method}; change one of the two'
        )
    return wanted


def _without_files(path: str, config: QuantConfig, device: str) -> IncScales:
    fixed = None
    if not config.dynamic_quantization:
        fixed = fixed_scale(config.scale_method.default.activation, device)
    elif any(config.quantises(name, "VLLMKVCache") for name in _SOME_CACHES):
        raise ValueError(
            f'{path}: "dynamic_quantization" would scale the KV cache as values come, '
            'which fp8_inc does not; add "VLLMKVCache" to blocklist.types, or take a '
            'calibrated scale_method such as "maxabs_hw"'
        )
    return IncScales(
        path, config, device, {}, frozenset(), fixed, {}, {}, (), "no files"
    )


_SOME_CACHES = tuple(
    f"model.layers.0.self_attn.attn.impl.{name}"
    for name, node in ATTENTION_NODES.items()
    if node.is_cache
)


def _read_rank(
    config: QuantConfig,
    device: str,
    kinds: list[FoundFiles],
    size: int,
    rank: int,
    wanted: Callable[[str], bool] | None = None,
) -> tuple[dict[str, NodeScales], list[str]]:
    """The scales of one rank, cached or else computed, and the files read."""
    records: dict[str, dict[str, NodeRecord]] = {_SCALES: {}, _MEASUREMENTS: {}}
    files: list[str] = []
    for found in kinds:
        file = found.ranks.get(size, {}).get(rank)
        # Cached scales do without measurements.
        if file and not (file.suffix == ".npz" and records[_SCALES]):
            records[found.mode] = read_nodes(file, found.mode, wanted)
            files.append(str(file))
    cached, measured = cached_scales(records[_SCALES]), records[_MEASUREMENTS]
    if cached and wanted is None:
        check_made_for(config, device, cached, measured, files[0])
    return compute_scales(config, device, measured) | cached, files


def _check_latents(
    config: QuantConfig,
    device: str,
    kinds: list[FoundFiles],
    ranks: Ranks,
    per_rank: Mapping[int, Mapping[str, NodeScales]],
) -> None:
    """Points out an MLA latent, one for all heads, that is not so on all ranks."""
    first = per_rank[ranks.read[0]]
    latents = {path: scales for path, scales in first.items() if _is_latent(path)}
    there = {rank for found in kinds for rank in found.ranks.get(ranks.made_on, ())}
    for rank in sorted(there - {ranks.read[0]}) if latents else ():
        nodes = per_rank.get(rank)
        if nodes is None:
            nodes, _ = _read_rank(
                config, device, kinds, ranks.made_on, rank, _is_latent
            )
        for path, scales in latents.items():
            if path in nodes and nodes[path].inputs != scales.inputs:
                logger.warning_once(
                    "fp8_inc: %s: %s has dequant scale %g on rank %d and %g on rank "
                    "%d, but the latent is the same on every rank: calibrations were "
                    "mixed, or a rank saw other prompts",
                    kinds[0].base,
                    path,
                    scales.inputs[0],
                    ranks.read[0],
                    nodes[path].inputs[0],
                    rank,
                )
                return


def _is_latent(path: str) -> bool:
    found = match_attention(path)
    return found is not None and "latent" in found.node.inputs


def _warn_unused_nodes(
    path: str, config: QuantConfig, nodes: Mapping[str, NodeScales]
) -> None:
    unused = sorted(config.scale_method.nodes.keys() - nodes.keys())
    if unused:
        logger.warning_once(
            "fp8_inc: %s: scale_method.nodes names modules that the files lack (%s)",
            path,
            ", ".join(unused),
        )
