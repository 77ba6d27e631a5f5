"""Keeps the actors of a rank able to reach its store while credentials change: they have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ...storage.stores.settings import StoreSettings

_PART = 4  # of the time that credentials have left, one such part passes before the next look


class SettingsRenewal:
    """Looks at the settings of a store from time to time, and sends them when they have changed, or when an actor asks.

    Temporary credentials (a role, a web identity, the machine's identity) are renewed long before they end by what provides them,
    so what is sent is valid when it arrives. A failed look or transmission is repeated.

    Args:
        settings: Returns the settings now; if True is given, as ``anew`` of ``settings_of``.
        sent: Those that were sent last.
        send: Sends them to all actors that need them.
        pauses: The least and the most seconds between two looks.
    """

    def __init__(
        self,
        settings: Callable[[bool], StoreSettings],
        sent: StoreSettings,
        send: Callable[[StoreSettings], None],
        *,
        pauses: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        self._shortest, self._longest = pauses
        self._settings, self._sent, self._send = settings, sent, send
        self._closed, self._woken = False, threading.Event()
        background.repeat("raystow-settings", self._look)

    def ask(self) -> None:
        """Look now, and send the settings even if they have not changed: an actor was refused with those that it has."""
        self._woken.set()

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        self._woken.set()

    def _look(self) -> bool:
        asked = self._woken.wait(self._pause())
        if self._closed:
            return False
        self._woken.clear()
        self._renew(asked)
        return True

    def _renew(self, asked: bool) -> None:
        if (now := self._settings(asked)) != self._sent or asked:
            self._send(now)
            self._sent = now

    def _pause(self) -> float:
        left = self._sent.expires - SYSTEM.now() if self._sent.expires else self._longest * _PART
        return max(self._shortest, min(self._longest, left / _PART))
