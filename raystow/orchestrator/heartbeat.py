"""Tells the coordinator that a rank restores or replays on, so that the other ranks wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..storage.runtime import background
from ..storage.runtime.clock import SYSTEM
from ..workers.protocol.messages import JournalVote, RankReading, RestoreVote
from .late_ranks import LATE, next_warning


class Heartbeat:
    """Thread-safe. ``send`` must not wait for an answer, since that would delay the rank. ``late``: seconds after which others
    warn of the rank."""

    def __init__(self, send: Callable[[RankReading], None], *, late: float = LATE) -> None:
        self._late = late
        self._send, self._sent = send, SYSTEM.monotonic()

    def beat(self, vote: RestoreVote | JournalVote) -> None:
        """Report that the rank has come further since this vote, unless it did so lately: the others are warned of
        ranks that have reported nothing for ``late`` seconds."""
        now = SYSTEM.monotonic()
        if now >= self._sent + min(vote.timeout / 4, self._late / 2):
            self._sent = now
            self._send(RankReading(vote.rank, vote.incarnation, vote.number, vote.timeout))

    def reset(self) -> None:
        """Let the next ``beat`` tell at once."""
        self._sent = float("-inf")


class StallWatch:
    """Notices that a rank reads nothing for long. Thread-safe. ``on_stall`` gets the seconds, whenever they have doubled."""

    def __init__(self, on_stall: Callable[[float], None]) -> None:
        self._on_stall = on_stall
        self._progress = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """The rank begins to read."""
        self.stop()
        self.progress()
        self._wait(LATE)

    def progress(self) -> None:
        """The rank has read something."""
        self._progress = SYSTEM.monotonic()

    def stop(self) -> None:
        """The rank reads no more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

    def _wait(self, seconds: float) -> None:
        with self._lock:
            self._timer = background.after(seconds, "raystow-stall", self._look)

    def _look(self) -> None:
        now, timer = SYSTEM.monotonic(), self._timer
        quiet = now - self._progress
        late = quiet >= LATE
        if late:
            self._on_stall(quiet)
        with self._lock:
            if self._timer is timer and timer is not None:
                wait = next_warning(now, self._progress) - now if late else LATE - quiet
                self._timer = background.after(wait, "raystow-stall", self._look)
