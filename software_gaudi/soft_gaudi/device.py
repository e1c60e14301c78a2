# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The module torch.hpu: one device, no queue."""

import contextlib
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from soft_gaudi.chip import chip, memory_bytes


class Stream:
    """A stream on which all has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    """An event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to ``end``."""
        return (end.time - self.time) * 1e3


class Memory:
    """Counts nothing: where tensors lie on cpu, nobody knows which are the device's."""

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def hpu_module(memory: Memory) -> ModuleType:
    """Builds torch.hpu; its memory is counted by ``memory``."""
    module = ModuleType("torch.hpu")
    stream = Stream()
    vars(module).update(
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        stream=lambda stream: contextlib.nullcontext(stream),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=_zero,
        get_device_name=lambda device=None: chip().upper(),
        get_device_capability=lambda device=None: chip(),
        get_device_properties=lambda device=None: SimpleNamespace(
            name=chip().upper(), total_memory=memory_bytes()
        ),
        mem_get_info=lambda device=None: (
            max(memory_bytes() - memory.allocated(), 0),
            memory_bytes(),
        ),
        memory_stats=lambda device=None: {},
        memory_allocated=lambda device=None: memory.allocated(),
        memory_reserved=lambda device=None: memory.allocated(),
        max_memory_allocated=lambda device=None: memory.peak(),
        reset_peak_memory_stats=lambda device=None: memory.reset_peak(),
        empty_cache=_nothing,
        init=_nothing,
        _lazy_init=_nothing,
        set_device=_nothing,
        synchronize=_nothing,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        random=SimpleNamespace(
            manual_seed=torch.manual_seed, manual_seed_all=torch.manual_seed
        ),
    )
    return module
