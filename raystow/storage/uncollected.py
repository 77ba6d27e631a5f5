"""Keeps Python's garbage collector out of the way: while very many objects are made at once, and of what is there to stay.

When many new ones have come it looks at the old ones too, and a process that trains has hundreds of thousands: a quarter of a
second, in the middle of a restore that takes as long. None of what is made here is in cycles. Afterwards it looks at what is
still there of it: let go inside.

A process that has loaded what it needs can spare it the modules, for good: they are most of what it would look at.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile, in no thread of the process. Also as a decorator."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:  # else another thread, or another call around this one, lets it go on
            gc.enable()


def freeze() -> None:
    """What is there now is looked at no more: for a process that has loaded what it works with."""
    gc.collect()
    gc.freeze()
