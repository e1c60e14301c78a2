# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The scales of one attention layer on one rank, from those of the whole model."""

from collections.abc import Callable, Mapping
from typing import get_args

import torch
from torch import nn

from vllm.fp8_inc.formats import Fp8Format
from vllm.fp8_inc.heads import local_heads
from vllm.fp8_inc.scales import AttentionScales, StaticScale
from vllm.fp8_inc.sources.producers import Role
from vllm.fp8_inc.sources.store import FoundScale

ROLES: tuple[Role, ...] = get_args(Role)
_STATE = "fp8_inc_amax"


def is_mla(module: nn.Module) -> bool:
    """Whether an attention layer caches one latent for K and V."""
    return hasattr(module, "kv_lora_rank")


class LayerScales:
    """What the scales of an attention layer stand for: the amax of each tensor.

    In a layer's ``state_dict`` it survives what is saved and loaded without the
    checkpoint (``--load-format sharded_state``), and holds for every device: a
    dequant scale is amax / max of its format.

    Attributes:
        amax: float64 [roles, heads of this rank], in the order of ``ROLES``; the
            same for every head where one scale serves all; NaN where there is none,
            and in what is left of a row with fewer heads.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        heads = max(module.num_heads, module.num_kv_heads)
        self.amax = torch.full((len(ROLES), heads), torch.nan, dtype=torch.float64)

    def join_state(self) -> None:
        """Makes ``amax`` a part of the layer's ``state_dict``."""

        def add(module, state, prefix, metadata) -> None:
            state[prefix + _STATE] = self.amax

        self.module.register_state_dict_post_hook(add)

    def clear(self) -> None:
        """Forgets everything, before the next load."""
        self.amax.fill_(torch.nan)

    @property
    def is_complete(self) -> bool:
        """Whether K and V have scales."""
        return not self.amax[[ROLES.index("k"), ROLES.index("v")], 0].isnan().any()

    def take(
        self,
        found: Mapping[Role, FoundScale],
        amax_of: Callable[[float, bool], float],
        rank: int,
        ranks: int,
    ) -> None:
        """Takes this rank's heads of the scales of a layer.

        Args:
            found: Role -> scale, of all heads of the model.
            amax_of: Turns a dequant scale into an amax; told whether it is one of
                a scale per head.
            rank: Tensor-parallel rank.
            ranks: Tensor-parallel world size.

        Raises:
            ValueError: Naming the key whose length does not fit the heads.
        """
        self.clear()
        for role, scale in found.items():
            amax = [amax_of(value, bool(scale.per_head)) for value in scale.values]
            try:
                local = self._of_this_rank(role, amax, rank, ranks)
            except ValueError as error:
                raise ValueError(f"{scale.key} {error}") from None
            self.amax[ROLES.index(role), : self._heads(role)] = torch.tensor(
                local, dtype=torch.float64
            )
        if is_mla(self.module):
            # One latent serves K and V: the larger covers both.
            k, v = ROLES.index("k"), ROLES.index("v")
            self.amax[k, 0] = self.amax[v, 0] = self.amax[[k, v], 0].max()

    def _of_this_rank(
        self, role: Role, amax: list[float], rank: int, ranks: int
    ) -> tuple[float, ...]:
        heads = self._heads(role)
        if is_mla(self.module) and role in ("k", "v"):
            return (max(amax),)  # of the expanded heads; the latent has none
        return local_heads(amax, heads, rank, ranks)

    def _heads(self, role: Role) -> int:
        if role not in ("k", "v"):
            return self.module.num_heads
        return 1 if is_mla(self.module) else self.module.num_kv_heads

    def scales(
        self, fmt: Fp8Format, dtype: torch.dtype, source: str
    ) -> AttentionScales:
        """Builds what kernels use.

        Args:
            fmt: The format of the device that serves.
            dtype: Of the activations.
            source: For the report.

        Raises:
            ValueError: Naming the role whose scale has no reciprocal in ``dtype``.
        """
        static: dict[Role, StaticScale] = {}
        for role, row in zip(ROLES, self.amax.tolist(), strict=True):
            values = [amax / fmt.max for amax in row[: self._heads(role)]]
            if values[0] != values[0]:
                continue
            same = len(set(values)) == 1
            try:
                static[role] = StaticScale.from_dequant(
                    values[0] if same else values, dtype
                )
            except ValueError as error:
                raise ValueError(f"{role}: {error}") from None
        return AttentionScales(source=source, **({"q": None} | static))
