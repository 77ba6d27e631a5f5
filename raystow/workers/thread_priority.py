"""Lowers the priority of threads that work in the background."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICE = 10  # the training comes first: it has to launch kernels in time


def give_way() -> None:
    """Lower the priority of this thread, on Linux only: elsewhere a thread has no priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # some sandboxes refuse it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
