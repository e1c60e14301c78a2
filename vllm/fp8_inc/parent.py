# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""An engine's process ends when the one that started it is gone.

vLLM's workers watch their engine core; the engine core watches nobody. After kill -9
of the API server, or the out-of-memory killer, it would keep its memory and its devices
for ever (tests/e2e/test_crashes.py).
"""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait

_SECONDS = 10  # for the engine to end its workers before it is killed


def follow_parent() -> None:
    """Starts the watch where this process is an engine core.

    multiprocessing's sentinel is a pipe whose other end the parent process holds:
    unlike PR_SET_PDEATHSIG it does not fire when a thread of the parent ends. An engine
    within the caller's process (no multiprocessing) and one of Ray are no such process.
    """
    process = multiprocessing.current_process()
    parent = multiprocessing.parent_process()
    if parent is None or not process.name.startswith("EngineCore"):
        return
    threading.Thread(
        target=_end_after, args=(parent.sentinel,), daemon=True, name="fp8_inc_parent"
    ).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)  # as the parent does when it ends in order
    time.sleep(_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
