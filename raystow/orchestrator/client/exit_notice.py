"""What happens at the end of a process that has not closed its ``Checkpointer``: its saves get some seconds more, an error in the
log names those that are not versions then, and the process fails where ``close`` would have raised."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TextIO

from ...storage.errors import RaystowError
from ...storage.runtime.clock import SYSTEM
from .failures import Failures
from .saves_in_flight import SavesInFlight

PATIENCE = 20.0
"""Seconds that the end of a process waits for the saves of all its Checkpointers together."""

_watched: dict[int, weakref.WeakKeyDictionary[SavesInFlight, Failures]] = {}
"""By process: a forked child has none of its parent's saves."""


def watch(saves: SavesInFlight, failures: Failures) -> None:
    """Wait for these saves at the end of this process, unless somebody has waited for all of them before.

    The first call must follow the import of Ray: what is registered last is called first, and then the connection still exists.
    """
    if not _watched:
        atexit.register(_end)
    _watched.setdefault(os.getpid(), weakref.WeakKeyDictionary())[saves] = failures


def _end() -> None:
    until, failed = SYSTEM.monotonic() + PATIENCE, False
    for saves, failures in [*_watched.get(os.getpid(), {}).items()]:
        if saves.closed:
            continue
        try:
            saves.wait_until(until)
        except (KeyboardInterrupt, SystemExit):  # SIGTERM raises the latter in a process that uses Ray
            until = 0.0
        saves.log_unsaved("the process ends without close(), which waits for saves: ")
        failed = failed or (failures.raises and bool(saves.steps()))
        try:
            failures.check_last()
        except RaystowError:
            failed = True
    if failed and sys.stderr is not None:
        sys.stderr = _FailingStream(sys.stderr)


class _FailingStream:
    """Standard error whose last flush fails, so that Python's exit status is 120, as ``sys.exit`` documents. An exit function
    cannot set the status: its exceptions are ignored, and ``os._exit`` would skip those of other libraries, such as Ray's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():  # after all exit functions
            raise OSError("the newest save is not a version")
