# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Teacher-forced next-token distributions; runs inside each worker.

The arms share all weights, so hidden states stand for distributions: those of the
reference are kept, and the head turns both into logits in the arm's own engine.
"""

from pathlib import Path
from typing import Any

import torch

_ROWS = 256  # positions whose logits are held at a time


class ForcedWorker:
    """A worker extension."""

    def kv_forced_start(self) -> None:
        """Keeps the hidden states of each forward pass from now on."""
        self._passes: list[torch.Tensor] = []

        def see(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._passes.append(hidden)

        self._forced = self.model_runner.model.register_forward_hook(see)

    def kv_forced_take(
        self, tokens: list[int], kept: str | None, reference: str | None
    ) -> dict[str, list[float]]:
        """Measures the one prompt that was just run.

        Args:
            tokens: The prompt.
            kept: Where to keep its hidden states, or None.
            reference: Where those of the reference arm are, or None.

        Returns:
            nll of each token but the first; with a reference also kl of its
            distribution to this one, and same, 1 where both have one favourite.
        """
        from safetensors.torch import load_file, save_file

        hidden = self._passes[0][: len(tokens)].contiguous()
        self._passes.clear()
        if kept and self.rank == 0:
            Path(kept).parent.mkdir(parents=True, exist_ok=True)
            save_file({"hidden": hidden}, kept)
        before = load_file(reference)["hidden"].to(hidden) if reference else None
        result: dict[str, list[float]] = {"nll": [], "kl": [], "same": []}
        for start in range(0, len(tokens) - 1, _ROWS):
            rows = slice(start, min(start + _ROWS, len(tokens) - 1))
            there = self._log_probabilities(hidden[rows])
            if there is None:  # a rank without logits
                continue
            following = torch.tensor(tokens[rows.start + 1 : rows.stop + 1])
            nll = -there.gather(1, following[:, None].to(there.device))
            result["nll"] += nll.flatten().tolist()
            if before is None:
                continue
            here = self._log_probabilities(before[rows])
            divergence = (here.exp() * (here - there)).sum(-1).clamp(min=0)
            result["kl"] += divergence.tolist()
            result["same"] += (here.argmax(-1) == there.argmax(-1)).double().tolist()
        return result

    def _log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[positions, vocabulary] float64."""
        logits = self.model_runner.model.compute_logits(hidden)
        return None if logits is None else logits.double().log_softmax(-1)

    def kv_forced_stop(self) -> None:
        """Ends what ``kv_forced_start`` began."""
        self._forced.remove()
