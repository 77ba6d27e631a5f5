"""The store as it truly is: linearizable, with a clock of its own that never jumps, and a memory of what it held before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from raystow.storage.object_store import ObjectInfo, Unfinished

from .clocks import EPOCH
from .scheduler import Scheduler

STALE = 60.0
"""Seconds that a listing lags behind at most."""


@dataclass(frozen=True)
class Held:
    """One object."""

    data: bytes
    tag: str
    modified: float


@dataclass(frozen=True)
class Change:
    """A write (``new``) or a deletion (``new`` is None) by ``who``, of what was ``old``."""

    time: float
    who: str
    key: str
    old: Held | None
    new: Held | None


class ModelStore:
    """Objects in a dict. ``watch`` is called after each change."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.objects: dict[str, Held] = {}
        self.unfinished: dict[str, Unfinished] = {}
        self.watch: Callable[[Change], None] = lambda change: None
        self.changes = 0
        self._writes = 0
        self._recent: deque[Change] = deque()

    @property
    def now(self) -> float:
        """Seconds since 1970."""
        return EPOCH + self._scheduler.time

    def put(self, who: str, key: str, data: bytes) -> str:
        """Write an object; its tag."""
        self._writes += 1
        held = Held(data, f"{self._writes:x}", self.now)
        old = self.objects.get(key)
        self.objects[key] = held
        self._changed(Change(self.now, who, key, old, held))
        return held.tag

    def delete(self, who: str, key: str) -> None:
        """Forget an object; one that is not there is no error."""
        old = self.objects.pop(key, None)
        if old is not None:
            self._changed(Change(self.now, who, key, old, None))

    def rot(self, key: str) -> None:
        """An object loses its last byte, by nobody's will."""
        self._writes += 1
        self.objects[key] = Held(self.objects[key].data[:-1], f"{self._writes:x}", self.now)

    def listing(self, prefix: str, lag: float) -> list[ObjectInfo]:
        """What begins with ``prefix``, as it was ``lag`` seconds ago, in the order of keys."""
        shown = {key: held for key, held in self.objects.items() if key.startswith(prefix)}
        if lag:
            for change in reversed(self._recent):
                if change.time <= self.now - lag:
                    break
                if not change.key.startswith(prefix):
                    continue
                if change.old is None:
                    shown.pop(change.key, None)
                else:
                    shown[change.key] = change.old
        return [ObjectInfo(key, len(held.data), held.modified) for key, held in sorted(shown.items())]

    def _changed(self, change: Change) -> None:
        self.changes += 1
        self._recent.append(change)
        while self._recent[0].time < self.now - STALE:
            self._recent.popleft()
        self.watch(change)
