"""How urgent threads are that do what nobody waits for."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICE = 10  # the training, which has to launch kernels in time, goes before them


def give_way() -> None:
    """Let this thread have the CPU when nothing more urgent wants it. On Linux, where that can be said of a thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # some sandboxes refuse it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
