"""What has happened in a world: the last events for people, all of them for the digest."""

from __future__ import annotations

from collections import deque

from blake3 import blake3

SHOWN = 40


class Violation(AssertionError):
    """What must never happen has happened. ``invariant`` names it."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what


class Journal:
    """``time``: asked for the time of each event, in seconds."""

    def __init__(self) -> None:
        self.time = 0.0
        self.events = 0
        self._last: deque[tuple[float, str, str]] = deque(maxlen=SHOWN)
        self._digest = blake3()

    def note(self, time: float, who: str, what: str) -> None:
        """An event. No text of it may depend on anything but the seed."""
        self.events += 1
        self._last.append((time, who, what))
        self._digest.update(f"{time!r} {who} {what}\n".encode())

    @property
    def digest(self) -> str:
        """Of every event so far."""
        return self._digest.hexdigest()[:32]

    def lines(self) -> list[str]:
        """The last events."""
        return [f"{time:12.3f}  {who:<14} {what}" for time, who, what in self._last]
