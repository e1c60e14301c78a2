# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What runs inside each worker of the engine; called through collective_rpc."""

import sys
from typing import Any

import torch

from vllm.fp8_inc.calibration.observers import Observer, percentile_of
from vllm.fp8_inc.calibration.output_error import RATIOS, output_errors, role_amax
from vllm.fp8_inc.formats import FORMATS
from vllm.fp8_inc.hpu_worker import is_hpu
from vllm.fp8_inc.ranks import tensor_parallel
from vllm.fp8_inc.sources.checkpoint import layer_of
from vllm.model_executor.layers.attention import Attention, MLAAttention

Numbers = dict[str, dict[str, list[float]]]


class CalibrationWorker:
    """A worker extension; results are plain lists, since they leave the process."""

    def kv_observe(
        self, histograms: bool, states: list[Numbers] | None = None
    ) -> list[str]:
        """Attaches an observer to each attention layer; returns the layers.

        Args:
            histograms: Whether percentiles will be asked for.
            states: Maxima of each rank to begin with, as ``kv_amax`` gave them.

        Raises:
            ValueError: For an attention layer without the name of a decoder layer.
        """
        state = states[self.rank] if states else {}
        self._observers: dict[str, Observer] = {}
        runner = self.model_runner
        # The HPU worker pads with slots of one more block; others with -1.
        slots = runner._PAD_SLOT_ID if is_hpu() else sys.maxsize
        for module in runner.model.modules():
            if not isinstance(module, (Attention, MLAAttention)):
                continue
            layer = layer_of(module.layer_name)
            if layer is None or layer in self._observers:
                raise ValueError(
                    f"attention layer {module.layer_name}: cannot be named"
                )
            observer = Observer(module, slots, histograms)
            observer.amax |= _tensors(state.get(layer, {}))
            self._observers[layer] = observer
        self._hooks = [observer.attach() for observer in self._observers.values()]
        return list(self._observers)

    def kv_amax(self) -> tuple[int, int, Numbers, dict[str, int]]:
        """Returns rank, number of ranks, the maxima, and tokens seen by layer."""
        amax = {
            layer: {role: x.tolist() for role, x in observer.amax.items()}
            for layer, observer in self._observers.items()
        }
        tokens = {layer: o.tokens for layer, o in self._observers.items()}
        return *tensor_parallel(), amax, tokens

    def kv_softmax_scales(self) -> dict[str, float]:
        """Returns what the logits of each layer are multiplied with."""
        return {n: float(o.layer.impl.scale) for n, o in self._observers.items()}

    def kv_percentiles(self, percent: float) -> tuple[int, int, Numbers]:
        """Returns rank, number of ranks, and what ``percent`` of values lie below."""
        found = {
            layer: {
                role: percentile_of(counts, percent).tolist()
                for role, counts in observer.counts.items()
            }
            for layer, observer in self._observers.items()
        }
        return *tensor_parallel(), found

    def kv_keep(self, keep: bool) -> None:
        """Whether the observers keep what they see, for the next call of all."""
        for observer in self._observers.values():
            observer.keep, observer.kept = keep, {}

    def kv_add_errors(self, device: str, amax: Numbers | None) -> None:
        """Adds up the output errors of the prompt that was kept.

        Args:
            device: Whose format is tried.
            amax: Layer -> role -> the one maximum of all heads and ranks; None for a
                scale a head.
        """
        if not hasattr(self, "_errors"):
            self._errors: dict[str, dict[str, torch.Tensor]] = {}
            self._squares: dict[str, float] = {}
        for layer, o in self._observers.items():
            most = o.amax if amax is None else _tensors(amax[layer])
            sums = self._errors.setdefault(layer, {})
            errors, square = output_errors(o.layer, o.kept, most, FORMATS[device])
            self._squares[layer] = self._squares.get(layer, 0.0) + square
            for role, new in errors.items():
                new = new if amax is None else new.sum(0, keepdim=True)
                sums[role] = sums.get(role, 0) + new

    def kv_least_errors(
        self, amax: Numbers | None
    ) -> tuple[int, int, Numbers, Numbers, Numbers]:
        """Returns rank, number of ranks, the amax to scale by, gain and error.

        The gain is the squared error divided by that of the plain amax; the error is
        relative to the square of the output. ``amax`` is as for ``kv_add_errors``.
        """
        best: Numbers = {}
        gains: Numbers = {}
        relative: Numbers = {}
        ratios = torch.tensor(RATIOS)
        for layer, roles in self._errors.items():
            best[layer], gains[layer], relative[layer] = {}, {}, {}
            own = self._observers[layer].amax
            known = own if amax is None else _tensors(amax[layer])
            for role, errors in roles.items():
                least, chosen = errors.cpu().min(1)
                most = role_amax(known, role).cpu() * ratios[chosen]
                best[layer][role] = most.tolist()
                plain = errors[:, 0].cpu().clamp(min=1e-30)
                gains[layer][role] = (least / plain).tolist()
                relative[layer][role] = (least / self._squares[layer]).tolist()
        return *tensor_parallel(), best, gains, relative

    def kv_stop(self) -> None:
        """Removes the observers."""
        for hook in self._hooks:
            hook.remove()
        self._observers.clear()


def _tensors(numbers: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    return {r: torch.tensor(x, dtype=torch.float32) for r, x in numbers.items()}


def qualified_name(worker: Any = CalibrationWorker) -> str:
    """The name under which the engine finds a worker extension."""
    return f"{worker.__module__}.{worker.__qualname__}"
