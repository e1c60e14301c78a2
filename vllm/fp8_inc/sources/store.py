# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The scales of one checkpoint, by layer and role."""

from dataclasses import dataclass

import torch

from vllm.fp8_inc.scales import check_dequant_scale, read_dequant_scales
from vllm.fp8_inc.sources.checkpoint import (
    ScaleKey,
    file_of,
    files_of,
    match_scale_key,
)
from vllm.fp8_inc.sources.producers import Role
from vllm.logger import init_logger

logger = init_logger(__name__)

# A scale and its reciprocal, each rounded to bf16, differ by this much.
_RECIPROCAL_TOLERANCE = 2**-7
_WAY_OUT = "Calibrate the checkpoint again, or serve with --kv-cache-dtype auto"


@dataclass(frozen=True)
class FoundScale:
    """One scale, and where it was found.

    Attributes:
        key: Its name in the file.
        dequant_scale: x = q * dequant_scale; the largest where each head has one.
        reciprocal: Whether it was stored as its reciprocal, a quant scale.
        per_head: The dequant scale of each head; empty where one serves all.
    """

    key: str
    dequant_scale: float
    reciprocal: bool = False
    per_head: tuple[float, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """The dequant scales: one, or one for each head."""
        return self.per_head or (self.dequant_scale,)


class ScaleStore:
    """Takes the scales out of a stream of tensors.

    Attributes:
        found: Layer (``layers.N``) -> role -> scale.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.found: dict[str, dict[Role, FoundScale]] = {}
        self._towers: list[str] = []
        self._ignored: list[str] = []

    def clear(self) -> None:
        """Forgets everything, before the next load."""
        self.found.clear()
        self._towers.clear()
        self._ignored.clear()

    def take(self, key: str, tensor: torch.Tensor) -> bool:
        """Keeps ``tensor`` where it is a scale; returns whether it is.

        Raises:
            ValueError: For a scale that is not positive and finite, or of another
                shape than per tensor or per head; a zero-point other than 0; two
                unequal scales for one role.
        """
        scale = match_scale_key(key)
        if scale is None:
            return False
        if scale.tower:
            self._towers.append(key)
        elif scale.use == "ignored":
            self._ignored.append(key)
        elif scale.use == "zero":
            self._check_zero_point(key, tensor)
        else:
            self._add(scale, key, tensor)
        return True

    def report_ignored(self) -> None:
        """Says in one line each what was taken out and is not used."""
        if self._towers:
            logger.info_once(
                "fp8_inc: %d scales of a vision or audio tower are ignored (%s)",
                len(self._towers),
                self._towers[0],
            )
        if self._ignored:
            logger.debug(
                "fp8_inc: %d tensors that are no scales are ignored (%s)",
                len(self._ignored),
                self._ignored[0],
            )

    def _check_zero_point(self, key: str, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.float4_e2m1fn_x2:  # which converts to nothing
            tensor = tensor.view(torch.uint8)
        values = tensor.double()  # FP8 dtypes compare with nothing
        if (values == 0).all():
            return
        wrong = values[values != 0].flatten()[0].item()
        raise ValueError(
            f"{file_of(key, self.model)}: {key} has the value {wrong:g}, but a "
            f"zero-point must be 0: FP8 is symmetric. {_WAY_OUT}"
        )

    def _add(self, scale: ScaleKey, key: str, tensor: torch.Tensor) -> None:
        reciprocal = scale.use == "quant_scale"
        try:
            values = read_dequant_scales(tensor)
            if reciprocal:
                values = tuple(1 / value for value in values)
                for value in values:
                    check_dequant_scale(value)
        except ValueError as error:
            raise ValueError(
                f"{file_of(key, self.model)}: {key} {error}. {_WAY_OUT}"
            ) from None
        per_head = values if len(values) > 1 else ()
        new = FoundScale(key, max(values), reciprocal, per_head)
        roles = self.found.setdefault(scale.layer, {})
        for role in scale.roles:
            known = roles.setdefault(role, new)
            self._check_same(scale.layer, role, known, new)
            if known.reciprocal and not reciprocal:
                roles[role] = new

    def _check_same(
        self, layer: str, role: Role, known: FoundScale, new: FoundScale
    ) -> None:
        tolerance = 0.0
        if known.reciprocal != new.reciprocal:
            tolerance = _RECIPROCAL_TOLERANCE
        pairs = list(zip(known.values, new.values, strict=False))
        if len(known.values) == len(new.values) and all(
            abs(a - b) <= tolerance * a for a, b in pairs
        ):
            return
        a, b = next((p for p in pairs if p[0] != p[1]), pairs[0])
        values = f"{a:.9g} and {b:.9g}"
        if len(known.values) != len(new.values):
            values = f"{len(known.values)} and {len(new.values)} of them"
        if known.key == new.key:
            files = " and ".join(files_of(new.key, self.model)) or self.model
            raise ValueError(
                f"{files}: {new.key} of {layer} is there twice with unequal "
                f"values ({values}); remove the shard that is out of date"
            )
        raise ValueError(
            f"{file_of(new.key, self.model)}: {known.key} and {new.key} are both "
            f"for {role} of {layer} and have unequal dequant scales ({values}); "
            "remove one"
        )
