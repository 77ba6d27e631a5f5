"""Tells callbacks of each durable version, in order, on a thread of their own, so that a slow tracker delays nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ...storage.errors import StateError
from ...storage.log import Log
from ...storage.version import Version


class VersionCallback(Protocol):
    """An object that ``Checkpointer(callbacks=)`` tells of durable versions."""

    def on_version(self, version: Version) -> None:
        """Take note of a durable version.

        An exception is logged as a warning, and stops neither saves nor the training.

        Args:
            version: The version. Its ``stall`` reads one small object from the store.
        """


class VersionCallbacks:
    """The callbacks of one rank."""

    def __init__(self, callbacks: Sequence[VersionCallback], log: logging.Logger | Log) -> None:
        listed = isinstance(callbacks, Sequence)
        if not listed or not all(callable(getattr(callback, "on_version", None)) for callback in callbacks):
            raise StateError(f"callbacks is {callbacks!r:.80}", remedy="give a list of objects with a method on_version(version)")
        self._callbacks, self._log = tuple(callbacks), log
        self._thread = ThreadPoolExecutor(1, "raystow-callbacks")

    def tell(self, version: Version) -> None:
        """Call all callbacks in the background; after ``close`` only log that they are not called."""
        for callback in self._callbacks:
            try:
                self._thread.submit(self._call, callback, version)
            except RuntimeError:
                what, told = "%s is not told of version %d, which was found durable after close()", type(callback).__name__
                self._log.warning(what, told, version.id, extra={"version": version.id, "step": version.step})

    def close(self) -> None:
        """Wait until every callback has returned."""
        self._thread.shutdown()

    def _call(self, callback: VersionCallback, version: Version) -> None:
        try:
            callback.on_version(version)
        except Exception as error:
            what = "%s failed for version %d: %s: %s"
            told = type(callback).__name__, version.id, type(error).__name__, error
            self._log.warning(what, *told, extra={"version": version.id, "step": version.step})
