# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What was read: the scales of one rank, and which modules are quantised."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.fp8_inc.sources.checkpoint import layer_of
from vllm.fp8_inc.sources.inc.linears import ExpertScales, LinearScales
from vllm.fp8_inc.sources.inc.nodes import IncRole
from vllm.fp8_inc.sources.inc.schema import QuantConfig
from vllm.fp8_inc.sources.store import FoundScale

_MHA_ROLES: tuple[IncRole, ...] = ("k", "v", "q", "q_decode", "prob")
_MLA_ROLES: tuple[IncRole, ...] = ("k", "v", "q", "q_latent", "prob")


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
        excluded: ``layers.N`` that the files know and that keep a bf16 cache.
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

    def scales_of(
        self, layer_name: str, is_mla: bool
    ) -> Mapping[IncRole, FoundScale] | None:
        """The scales of an attention layer, or None where it keeps a bf16 cache.

        Args:
            layer_name: Of the model, as ``model.layers.3.self_attn.attn``; where a
                layer reads the cache of another, of that one.
            is_mla: Whether it caches a latent.

        Raises:
            ValueError: If its cache is to be quantised and was not measured.
        """
        layer = layer_of(layer_name)
        if layer in self.excluded or not self.quantises_cache(layer_name, is_mla):
            return None
        if self.fixed is not None:
            scale = FoundScale("scale_method", self.fixed)
            return dict.fromkeys(_MLA_ROLES if is_mla else _MHA_ROLES, scale)
        found = self.attention.get(layer or "", {})
        if {"k", "v"} <= found.keys():
            return found
        if self.config.ignore_modules_wo_measures and not found:
            return None
        raise ValueError(
            f"{', '.join(self.files)}: the cache of {layer_name} was not measured. "
            "Calibrate with the lists with which you serve, add it to blocklist.names, "
            'or set "ignore_modules_wo_measures": true to keep it in bf16'
        )

    def path_of(self, path: str, known: Mapping[str, object]) -> str:
        """The name that the files have for a module of the model, if they have it.

        Args:
            path: Of the module, as ``model.layers.3.mlp.down_proj``.
            known: The names of the files.
        """
        if path in known:
            return path
        wanted = _within_layers(path)
        return next((name for name in known if _within_layers(name) == wanted), path)

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


# The worker's MLA wrapper holds the projections, and its implementation kv_b_proj.
_WRAPPERS = re.compile(r"\.(?:routed_experts|mla_attn|impl)(?=\.)")


def _within_layers(path: str) -> str:
    """What the layouts of vLLM and of the calibration have in common."""
    return _WRAPPERS.sub("", path.partition("layers.")[2] or path)
