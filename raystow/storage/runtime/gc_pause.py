"""Pauses cyclic garbage collection during bulk allocation.

A collection that many new objects trigger also visits the old ones. A training process has hundreds of thousands: a quarter of a
second during a restore that takes as long. Nothing that is allocated here is part of a cycle.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_switching = threading.Lock()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pause collection in all threads of the process. Also a decorator."""
    with _switching:  # if another thread enabled it between the two calls, nobody would enable it any more
        was = gc.isenabled()
        gc.disable()
    try:
        yield
    finally:
        if was:  # else another thread or an outer call enables it
            with _switching:
                gc.enable()


def collect_rarely() -> None:
    """As ``freeze``; from now on, what has survived two collections is visited after millions of allocations only. For an event
    loop: with thousands of waiting calls, such a visit would hold it for a tenth of a second, several times in each save."""
    freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 1000)


def freeze() -> None:
    """Exclude the present objects from later collections: for a process that has loaded its modules."""
    gc.collect()
    gc.freeze()
