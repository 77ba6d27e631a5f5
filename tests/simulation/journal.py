"""The event log of a world: it keeps the last events for reports and a digest of all events."""

from __future__ import annotations

from collections import deque

from blake3 import blake3

SHOWN = 40


class Violation(AssertionError):
    """A violated invariant."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what


class Journal:
    """The event log."""

    def __init__(self) -> None:
        self.time = 0.0
        self.events = 0
        self._last: deque[tuple[float, str, str]] = deque(maxlen=SHOWN)
        self._digest = blake3()

    def note(self, time: float, who: str, what: str) -> None:
        """Add an event. Its text must depend only on the seed."""
        self.events += 1
        self._last.append((time, who, what))
        self._digest.update(f"{time!r} {who} {what}\n".encode())

    @property
    def digest(self) -> str:
        """Digest of all events so far."""
        return self._digest.hexdigest()[:32]

    def lines(self) -> list[str]:
        """Return the last events as lines of text."""
        return [f"{time:12.3f}  {who:<14} {what}" for time, who, what in self._last]
