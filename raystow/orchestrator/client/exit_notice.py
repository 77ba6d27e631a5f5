"""What happens at the end of a process that has not closed its ``Checkpointer``: its saves get some seconds more, and an error in
the log names those that are not versions then."""

from __future__ import annotations

import atexit
import os
import weakref

from ...storage.runtime.clock import SYSTEM
from .saves_in_flight import SavesInFlight

PATIENCE = 20.0
"""Seconds that the end of a process waits for the saves of all its Checkpointers together."""

_watched: dict[int, weakref.WeakSet[SavesInFlight]] = {}  # by process: a forked child has none of its parent's saves


def watch(saves: SavesInFlight) -> None:
    """Wait for these saves at the end of this process, unless somebody has waited for all of them before.

    The first call must follow the import of Ray: what is registered last is called first, and then the connection still exists.
    """
    if not _watched:
        atexit.register(_end)
    _watched.setdefault(os.getpid(), weakref.WeakSet()).add(saves)


def _end() -> None:
    until = SYSTEM.monotonic() + PATIENCE
    for saves in [saves for saves in _watched.get(os.getpid(), ()) if not saves.closed]:
        try:
            saves.wait_until(until)
        except (KeyboardInterrupt, SystemExit):  # SIGTERM raises the latter in a process that uses Ray
            until = 0.0
        saves.log_unsaved("the process ends without close(), which waits for saves: ")
