"""Tells callbacks of each durable version, in order, on a thread of their own, so that a slow tracker delays nothing."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Protocol

from ...storage.errors import StateError
from ...storage.log import Log
from ...storage.runtime import background
from ...storage.versions.version import Version


class VersionCallback(Protocol):
    """An object that ``Checkpointer(callbacks=)`` tells of durable versions."""

    def on_version(self, version: Version) -> None:
        """Take note of a durable version.

        An exception is logged as a warning, and stops neither saves nor the training.

        Args:
            version: The version. Its ``stall`` reads one small object from the store.
        """


class VersionCallbacks:
    """The callbacks of one rank. ``patience``: seconds for which ``close`` waits for them."""

    def __init__(self, callbacks: Sequence[VersionCallback], log: logging.Logger | Log, *, patience: float = 60.0) -> None:
        self._patience = patience
        listed = isinstance(callbacks, Sequence)
        if not listed or not all(callable(getattr(callback, "on_version", None)) for callback in callbacks):
            raise StateError(f"callbacks is {callbacks!r:.80}", remedy="give a list of objects with a method on_version(version)")
        self._callbacks, self._log = tuple(callbacks), log
        self._calls: queue.SimpleQueue[tuple[VersionCallback, Version] | None] = queue.SimpleQueue()
        self._thread = background.start("raystow-callbacks", self._run) if callbacks else None
        self._calling: tuple[VersionCallback, Version] | None = None
        self._closed, self._lock = False, threading.Lock()

    def tell(self, version: Version) -> None:
        """Call all callbacks in the background; after ``close`` only log that they are not called."""
        with self._lock:  # what is put after the None of ``close`` is lost
            for callback in self._callbacks:
                if self._closed:
                    self._warn("%s was not called for version %d, which was found durable after close()", callback, version)
                else:
                    self._calls.put((callback, version))

    def close(self) -> None:
        """Wait until every callback has returned, but no longer than ``patience``."""
        with self._lock:
            self._closed = True
            self._calls.put(None)
        if self._thread is not None:
            self._thread.join(self._patience)
        if (calling := self._calling) is not None:
            self._warn("%s has not returned for version %d; close() does not wait for it any longer", *calling)

    def _run(self) -> None:
        while (calling := self._calls.get()) is not None:
            self._calling = calling
            callback, version = calling
            try:
                callback.on_version(version)
            except Exception as error:
                self._warn("%s failed for version %d: %s: %s", callback, version, type(error).__name__, error)
            self._calling = None

    def _warn(self, what: str, callback: VersionCallback, version: Version, *more: object) -> None:
        fields = type(callback).__name__, version.id, *more
        self._log.warning(what, *fields, extra={"version": version.id, "step": version.step})
