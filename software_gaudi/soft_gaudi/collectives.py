# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The process-group backend `hccl`, over gloo."""

from datetime import timedelta

import torch.distributed as dist


def _hccl(
    store: "dist.Store", rank: int, size: int, timeout: timedelta
) -> "dist.ProcessGroup":
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def install() -> None:
    """Registers hccl for both device names, which are one memory here."""
    if "hccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("hccl", _hccl, devices=["hpu", "cpu"])
