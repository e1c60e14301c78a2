# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Whose files a rank reads, and one set of scales out of those of many ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm.fp8_inc.sources.inc.files import FoundFiles
from vllm.fp8_inc.sources.inc.node_scales import NodeScales


@dataclass(frozen=True)
class Ranks:
    """The ranks whose files are read.

    Attributes:
        made_on: World size at calibration.
        read: The ranks; one, its own, where the world sizes agree.
        served_on: World size now.
    """

    made_on: int
    read: tuple[int, ...]
    served_on: int

    @property
    def is_own(self) -> bool:
        """Whether each rank has a file of its own."""
        return self.made_on == self.served_on

    def __str__(self) -> str:
        if self.is_own:
            return f"rank {self.read[0]} of {self.made_on}"
        if self.made_on == 1:
            return f"made on one rank, served on {self.served_on}"
        return (
            f"the largest of ranks 0 to {self.made_on - 1}, served on {self.served_on}"
        )


def choose_ranks(
    kinds: Iterable[FoundFiles], tp_rank: int, tp_size: int
) -> Ranks | None:
    """Chooses which files a rank reads, or None where there are none.

    Args:
        kinds: Measurements and cached scales, as far as they are used.
        tp_rank: Of this worker.
        tp_size: Number of ranks that serve.

    Raises:
        ValueError: For a missing rank, or files of several world sizes none of
            which is that of the server.
    """
    kinds = list(kinds)
    sizes = sorted({size for found in kinds for size in found.ranks})
    if not sizes:
        return None
    if tp_size in sizes:
        _check_complete(kinds, tp_size, [tp_rank])
        return Ranks(tp_size, (tp_rank,), tp_size)
    if len(sizes) > 1:
        raise ValueError(
            f"{kinds[0].base}*: the folder holds files made on "
            f"{' and on '.join(map(str, sizes))} ranks, but {tp_size} serve; leave "
            "those of one calibration there"
        )
    ranks = range(sizes[0])
    _check_complete(kinds, sizes[0], ranks)
    return Ranks(sizes[0], tuple(ranks), tp_size)


def _check_complete(kinds: list[FoundFiles], size: int, ranks: Iterable[int]) -> None:
    for found in kinds:
        there = found.ranks.get(size)
        missing = [rank for rank in ranks if there and rank not in there]
        if missing:
            raise ValueError(
                f"{found.base}_{missing[0]}_{size}.json is missing (rank "
                f"{', '.join(map(str, missing))} of {size}); copy the files of all "
                "ranks, or calibrate again"
            )


def unify(per_rank: Mapping[int, Mapping[str, NodeScales]]) -> dict[str, NodeScales]:
    """Takes the elementwise maximum over ranks, which covers every rank's heads.

    Scales grow with the amax, so this is the scale of the largest amax. A module
    that some ranks lack (pipeline stages) is taken from those that have it. Weight
    scales per output channel belong to a rank's own channels and are left out.

    Raises:
        ValueError: Where a module has another number of inputs on another rank.
    """
    if len(per_rank) == 1:
        return dict(next(iter(per_rank.values())))
    result: dict[str, NodeScales] = {}
    for rank, nodes in per_rank.items():
        for path, scales in nodes.items():
            known = result.get(path)
            if known and len(known.inputs) != len(scales.inputs):
                raise ValueError(
                    f"{path} has {len(scales.inputs)} inputs on rank {rank}, but "
                    f"{len(known.inputs)} on another; these files are not of one "
                    "calibration"
                )
            result[path] = _larger(known, scales) if known else _per_tensor(scales)
    return result


def _larger(one: NodeScales, other: NodeScales) -> NodeScales:
    weights = [w for w in (one.weight, _per_tensor(other).weight) if w is not None]
    return NodeScales(
        tuple(map(max, one.inputs, other.inputs)),
        max(weights) if len(weights) == 2 else None,
    )


def _per_tensor(scales: NodeScales) -> NodeScales:
    if scales.weight is None or len(scales.weight) == 1:
        return scales
    return NodeScales(scales.inputs)
