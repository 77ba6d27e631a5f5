"""Tells the node worker that this process may need it, also while nothing is saved or restored: else it would end."""

from __future__ import annotations

import contextlib
import threading

from ...storage.errors import ClusterError
from ...workers.protocol.messages import Acknowledged, KeepNode
from ...workers.protocol.unix_channel import Connection

AFTER_DEATH = 600.0
"""Seconds for which a node keeps its memory after a process that has not closed its Checkpointer: it may be started again."""

_ANSWER = 60.0  # seconds


class Presence:
    """Thread-safe. ``uri``: of the repository. ``seconds``: for which the node keeps its memory after ``close``."""

    def __init__(self, uri: str, seconds: float) -> None:
        self._uri, self._seconds = uri, seconds
        self._address = ""
        self._connection: Connection | None = None
        self._closed, self._lock = False, threading.Lock()

    def announce(self, address: str) -> None:
        """Connect to the node worker at an address, unless this is done. Raises ``ClusterError`` if it does not answer."""
        with self._lock:
            if self._closed or self._address == address:
                return
            self._disconnect()
            self._connection = Connection.connect(address)
            self._connection.send(KeepNode(self._uri, max(self._seconds, AFTER_DEATH)))
            self._connection.receive(Acknowledged, timeout=_ANSWER)
            self._address = address

    def close(self, *, failed: bool) -> None:
        """Disconnect for good. ``failed``: as if this process had died."""
        with self._lock:
            if self._connection is not None and not failed:
                with contextlib.suppress(ClusterError):  # the node worker was killed
                    self._connection.send(KeepNode(self._uri, self._seconds))
            self._closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
