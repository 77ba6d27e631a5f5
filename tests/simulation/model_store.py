"""The true store: linearizable, with its own clock that never jumps and a history of recent changes for stale listings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from raystow.storage.object_store import ObjectInfo, Unfinished

from .clocks import EPOCH
from .scheduler import Scheduler

STALE = 60.0
"""Maximum lag of a listing in seconds."""


@dataclass(frozen=True)
class Held:
    """One object."""

    data: bytes
    tag: str
    modified: float


@dataclass(frozen=True)
class Change:
    """A write or a deletion (``new`` is None) of an object by process ``who``; ``old`` is the object before it."""

    time: float
    who: str
    key: str
    old: Held | None
    new: Held | None


class ModelStore:
    """A store that keeps objects in a dict and calls ``watch`` after each change."""

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
        """Write an object; return its tag."""
        self._writes += 1
        held = Held(data, f"{self._writes:x}", self.now)
        old = self.objects.get(key)
        self.objects[key] = held
        self._changed(Change(self.now, who, key, old, held))
        return held.tag

    def delete(self, who: str, key: str) -> None:
        """Delete an object; a missing object is no error."""
        old = self.objects.pop(key, None)
        if old is not None:
            self._changed(Change(self.now, who, key, old, None))

    def rot(self, key: str) -> None:
        """Corrupt an object: remove its last byte without a reported change."""
        self._writes += 1
        self.objects[key] = Held(self.objects[key].data[:-1], f"{self._writes:x}", self.now)

    def listing(self, prefix: str, lag: float) -> list[ObjectInfo]:
        """Return the objects with this prefix, as they were ``lag`` seconds ago, sorted by key."""
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
