"""What rank 0 does so that Ray Train and the repository know of the same versions. Knows neither Ray nor a training loop.

A version is told to Train once, in the order of commits, and pinned before: whatever retention there is, nothing drops what Train
may list. Train drops by its own rules; a version that it lists no more, though it lists a newer one, loses its pin and goes.
Nothing is remembered but what the root's pins and Train's list say: a new process of rank 0 goes on from there.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ....storage.errors import Damaged, RaystowError, StateError, Untrusted
from ....storage.format.root import Entry, Root
from ....storage.repository import Repository
from .pointer import Identity, folder

logger = logging.getLogger(__name__)

Listing = Callable[[float], Collection[Identity]]
"""The versions that Train lists, after waiting up to so many seconds until it has taken all reports."""


@dataclass(frozen=True)
class News:
    """A version to tell Train of: its pointer's name, and those of its metrics that JSON has: Train's snapshot is JSON."""

    folder: str
    metrics: dict[str, Any]


class Ledger:
    """``run``: the run's name. ``listed``: see ``Listing``. ``point``: makes the pointer to a version; may raise ``OSError``.

    ``look`` once before the process saves: what is there then was saved by others, and only the newest of it concerns Train.
    """

    def __init__(self, repository: Repository, run: str, *, listed: Listing, point: Callable[[Entry], None]) -> None:
        self._repository, self._run, self._listed, self._point = repository, run, listed, point
        self._news: deque[News] = deque()
        self._told: int | None = None  # the newest version that Train knows of, or will when it has heard the news
        self._lock = threading.Lock()
        self._work, self._closed = threading.Event(), False
        threading.Thread(target=self._keep, name="raystow-train", daemon=True).start()

    def wake(self) -> None:
        """There may be a new version: ``look`` and ``tidy`` on a thread of the ledger's."""
        self._work.set()

    @property
    def begun(self) -> bool:
        """Whether it has looked, with success."""
        return self._told is not None

    def look(self) -> None:
        """Pin the versions that are new, make their pointers, and keep them as news. What fails is logged, and tried again by the
        next call."""
        try:
            with self._lock:
                self._look()
        except (RaystowError, OSError) as error:
            logger.warning("Ray Train is not told of new versions yet: %s", error)

    def take(self) -> list[News]:
        """The news since the last call, oldest first."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def tidy(self, patience: float = 0.0) -> None:
        """Drop the versions that Train has dropped, once it has taken all reports; after ``patience`` seconds, those that it has
        dropped until then. What fails is logged, and tried again by the next call."""
        try:
            drop_unlisted(self._repository, self._run, self._listed(patience))
        except (RaystowError, OSError) as error:
            logger.warning("versions that Ray Train has dropped stay until the next save: %s", error)

    def close(self) -> None:
        """End the thread, when it has done what it is at."""
        self._closed = True
        self._work.set()

    def _keep(self) -> None:
        while self._work.wait() and not self._closed:
            self._work.clear()
            self.look()
            self.tidy()

    def _look(self) -> None:
        root = self._repository.root()
        if self._told is None:
            listed = self._listed(10.0)
            for entry in root.versions:  # pinned already, unless the root was repaired or somebody took the pin off
                if (entry.id, entry.origin) in listed and _pin(self._run, entry.id) not in root.pins:
                    self._repository.pin(self._repository.at(entry), _pin(self._run, entry.id))
            self._told = _known(root, self._run, listed)
        for entry in root.versions:
            if entry.id > self._told:
                self._add(entry)
                self._told = entry.id

    def _add(self, entry: Entry) -> None:
        version = self._repository.at(entry)
        try:
            metrics = {name: value for name, value in version.metrics.items() if not isinstance(value, bytes | complex)}
            self._repository.pin(version, _pin(self._run, entry.id))
        except (Damaged, Untrusted, StateError) as error:  # StateError: dropped meanwhile
            logger.warning("version %d, step %d, is not reported to Ray Train: %s", entry.id, entry.step, error)
            return
        self._point(entry)
        self._news.append(News(folder(entry), metrics))


def drop_unlisted(repository: Repository, run: str, listed: Collection[Identity]) -> None:
    """Drop the versions that were told to Train and that it lists no more; but none newer than the newest that it lists: those
    it may not have heard of yet. What is pinned otherwise, leased, or verified last stays until it is not."""
    root = repository.root()
    newest = _newest(root, listed)
    pins = {_pin(run, e.id) for e in root.versions if e.id < newest and (e.id, e.origin) not in listed} & root.pins.keys()
    if not pins:
        return
    for entry in repository.plan_release(pins).execute():
        logger.info("version %d, step %d, is dropped: Ray Train has dropped it", entry.id, entry.step)


def _known(root: Root, run: str, listed: Collection[Identity]) -> int:
    """The newest version that Train need not be told of. If it lists none: all before the first that was to be told to it, or
    before the newest, from which the run goes on."""
    if newest := _newest(root, listed):
        return newest
    ours = [entry.id for entry in root.versions if _pin(run, entry.id) in root.pins]
    return min(ours + [entry.id for entry in root.versions[-1:]], default=1) - 1


def _newest(root: Root, listed: Collection[Identity]) -> int:
    return max((entry.id for entry in root.versions if (entry.id, entry.origin) in listed), default=0)


def _pin(run: str, id: int) -> str:
    return f"ray-train/{run}/{id}"
