"""Tells the node worker that this process may need it, also while nothing is saved or restored: else it would end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from ...storage.errors import ClusterError
from ...storage.runtime import background
from ...workers.protocol.messages import Acknowledged, KeepNode, RenewSettings
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
        send_settings: Lets the settings of the store be sent again.
    """

    def __init__(
        self, uri: str, seconds: float, renew: Callable[[], object], send_settings: Callable[[], object] = lambda: None
    ) -> None:
        self._uri, self._seconds, self._renew, self._send_settings = uri, seconds, renew, send_settings
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
        """Serve the node worker until it, or this connection, ends."""
        while connection.receive(RenewSettings) is not None:
            self._send_settings()
        with self._lock:
            lost = connection is self._connection
        if lost:
            with contextlib.suppress(ClusterError):  # the next save tries again, and raises
                self._renew()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
