"""Keeps the actors of a rank able to reach its store while credentials change: they have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...storage import background
from ...storage.clock import SYSTEM
from ...storage.stores.settings import StoreSettings

_LONGEST, _SHORTEST = 60.0, 1.0  # seconds between two looks
_PART = 4  # of the time that credentials have left, one such part passes before the next look


class SettingsRenewal:
    """Looks at the settings of a store from time to time, and sends them when they have changed.

    Temporary credentials (a role, a web identity, the machine's identity) are renewed long before they end by what provides them,
    so what is sent is valid when it arrives. A failed look or transmission is repeated.

    Args:
        settings: Returns the settings now.
        sent: Those that were sent last.
        send: Sends them to all actors that need them.
    """

    def __init__(self, settings: Callable[[], StoreSettings], sent: StoreSettings, send: Callable[[StoreSettings], None]) -> None:
        self._settings, self._sent, self._send = settings, sent, send
        self._closed = threading.Event()
        background.repeat("raystow-settings", self._look)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _look(self) -> bool:
        if self._closed.wait(self._pause()):
            return False
        self._renew()
        return True

    def _renew(self) -> None:
        if (now := self._settings()) != self._sent:
            self._send(now)
            self._sent = now

    def _pause(self) -> float:
        left = self._sent.expires - SYSTEM.now() if self._sent.expires else _LONGEST * _PART
        return max(_SHORTEST, min(_LONGEST, left / _PART))
