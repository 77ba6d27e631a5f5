"""Tells the node worker that this process may need it, also while nothing is saved or restored: else it would end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from ...storage import background
from ...storage.errors import ClusterError
from ...workers.protocol.messages import Acknowledged, KeepNode
from ...workers.protocol.unix_channel import Connection

AFTER_DEATH = 600.0
"""Seconds for which a node keeps its memory after a process that has not closed its Checkpointer: it may be started again."""

_ANSWER = 60.0  # seconds


class Presence:
    """Thread-safe.

    Args:
        uri: Of the repository.
        seconds: For which the node keeps its memory after ``close``.
        renew: Finds the node worker again after its process has died, and calls ``announce``. May raise ``ClusterError``.
    """

    def __init__(self, uri: str, seconds: float, renew: Callable[[], object]) -> None:
        self._uri, self._seconds, self._renew = uri, seconds, renew
        self._address = ""
        self._connection: Connection | None = None
        self._closed, self._lock = False, threading.Lock()

    def announce(self, address: str) -> None:
        """Connect to the node worker at an address, unless this is done. Raises ``ClusterError`` if it does not answer."""
        with self._lock:
            if self._closed or self._address == address:
                return
            self._disconnect()
            connection = Connection.connect(address)
            connection.send(KeepNode(self._uri, max(self._seconds, AFTER_DEATH)))
            connection.receive(Acknowledged, timeout=_ANSWER)
            self._address, self._connection = address, connection
            background.start("raystow-presence", self._watch, connection)

    def close(self, *, failed: bool) -> None:
        """Disconnect for good. ``failed``: as if this process had died."""
        with self._lock:
            if self._connection is not None and not failed:
                with contextlib.suppress(ClusterError):  # the node worker was killed
                    self._connection.send(KeepNode(self._uri, self._seconds))
            self._closed = True
            self._disconnect()

    def _watch(self, connection: Connection) -> None:
        """Wait for the end of the node worker, or of this connection."""
        connection.receive(Acknowledged)
        with self._lock:
            lost = connection is self._connection
        if lost:
            with contextlib.suppress(ClusterError):  # the next save tries again, and raises
                self._renew()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
