# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""One call to whichever ``select_experts`` the engine has."""

from collections.abc import Callable
from typing import Any

import torch


def select_experts(
    select: Callable[..., tuple[Any, ...]], **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls ``select`` and returns its weights and ids.

    vLLM's routers return (topk_weights, topk_ids); some releases add a third
    value, which no FP8 method uses.

    Args:
        select: A router's ``select_experts`` or the function of that name.
        **kwargs: Its arguments.

    Returns:
        topk_weights [tokens, top_k] and topk_ids [tokens, top_k].

    Raises:
        ValueError: If it returns neither two nor three values.
    """
    result = select(**kwargs)
    if len(result) not in (2, 3):
        raise ValueError(
            f"select_experts returned {len(result)} values; two (weights, ids) or "
            "three are known. The engine has changed: see layers/routing.py"
        )
    return result[0], result[1]
