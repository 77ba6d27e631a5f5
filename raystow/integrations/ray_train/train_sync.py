"""Keeps the versions of a repository and the checkpoints of Ray Train the same. Runs on rank 0, and imports no Ray.

Each version is pinned, then reported to Train once, in the order of commits, so that no retention drops a version that Train may
list. A version that Train lists no more, although it lists a newer one, is unpinned and dropped. All state is in the pins of the
root and in Train's list, so that a new process of rank 0 can continue.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping

from ...storage.errors import Damaged, RaystowError, StateError, Untrusted
from ...storage.format.root import Entry, Root
from ...storage.repository import Repository
from ...storage.runtime import background
from .pointer import Identity, folder

logger = logging.getLogger(__name__)

ListVersions = Callable[[float], Collection[Identity]]
"""Returns the versions that Train lists, after waiting up to this number of seconds until it has processed all reports."""


class TrainSync:
    """Reports new versions to Train, and drops those that Train has dropped.

    Call ``collect`` once before the process saves: of the versions that exist then, only the newest concerns Train. ``run``: the
    name of the run. ``write_pointer``: writes the pointer to a version; may raise ``OSError``.
    """

    def __init__(self, repository: Repository, run: str, *, listed: ListVersions, write_pointer: Callable[[Entry], None]) -> None:
        self._repository, self._run, self._listed, self._write_pointer = repository, run, listed, write_pointer
        self._reports: deque[tuple[str, Mapping[str, object]]] = deque()
        self._reported: int | None = None  # the newest version that is reported or among the reports
        self._lock = threading.Lock()
        self._work, self._closed = threading.Event(), False
        background.repeat("raystow-train", self._run_in_background)

    def wake(self) -> None:
        """Run ``collect`` and ``drop`` on a background thread, since there may be a new version."""
        self._work.set()

    @property
    def started(self) -> bool:
        return self._reported is not None

    def collect(self) -> None:
        """Pin new versions, write their pointers and queue their reports. Errors are logged; the next call tries again."""
        try:
            with self._lock:
                self._collect()
        except (RaystowError, OSError) as error:
            logger.warning("new versions are not reported to Ray Train yet: %s", error)

    def take_reports(self) -> list[tuple[str, Mapping[str, object]]]:
        """Return the versions to report since the last call, oldest first: the name of the pointer of each, and its metrics that
        JSON can represent, as Train requires."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def drop(self, timeout: float = 0.0) -> None:
        """Drop the versions that Train has dropped, after up to ``timeout`` seconds for its pending reports. Errors are logged;
        the next call tries again."""
        try:
            drop_unlisted(self._repository, self._run, self._listed(timeout))
        except (RaystowError, OSError) as error:
            logger.warning("versions that Ray Train has dropped stay until the next save: %s", error)

    def close(self) -> None:
        """End the background thread after its current work."""
        self._closed = True
        self._work.set()

    def _run_in_background(self) -> bool:
        self._work.wait()
        self._work.clear()
        if not self._closed:
            self.collect()
            self.drop()
        return not self._closed

    def _collect(self) -> None:
        root = self._repository.root()
        if self._reported is None:
            listed = self._listed(10.0)
            for entry in root.versions:  # pinned already, unless the root was repaired or the pin was removed
                if (entry.id, entry.origin) in listed and _pin(self._run, entry.id) not in root.pins:
                    self._repository.pin(self._repository.at(entry), _pin(self._run, entry.id))
            self._reported = _newest_reported(root, self._run, listed)
        for entry in root.versions:
            if entry.id > self._reported:
                self._add(entry)
                self._reported = entry.id

    def _add(self, entry: Entry) -> None:
        version = self._repository.at(entry)
        try:
            metrics = {name: value for name, value in version.metrics.items() if not isinstance(value, bytes | complex)}
            self._repository.pin(version, _pin(self._run, entry.id))
        except (Damaged, Untrusted, StateError) as error:  # StateError: it was dropped
            logger.warning("version %d, step %d, is not reported to Ray Train: %s", entry.id, entry.step, error)
            return
        self._write_pointer(entry)
        self._reports.append((folder(entry), metrics))


def drop_unlisted(repository: Repository, run: str, listed: Collection[Identity]) -> None:
    """Drop the versions that were reported and that Train lists no more.

    Versions newer than the newest that Train lists stay, since their reports may be pending; so do versions that are leased,
    verified last or pinned under another name.
    """
    root = repository.root()
    newest = _newest(root, listed)
    pins = {_pin(run, e.id) for e in root.listed if e.id < newest and (e.id, e.origin) not in listed} & root.pins.keys()
    if not pins:
        return
    for entry in repository.plan_release(pins).execute():
        logger.info("version %d, step %d, is dropped: Ray Train has dropped it", entry.id, entry.step)


def _newest_reported(root: Root, run: str, listed: Collection[Identity]) -> int:
    """The newest version that need not be reported: the newest that Train lists, else the one before the first that is pinned for
    it or, without one, before the newest, from which the run continues."""
    if newest := _newest(root, listed):
        return newest
    ours = [entry.id for entry in root.versions if _pin(run, entry.id) in root.pins]
    return min(ours + [entry.id for entry in root.versions[-1:]], default=1) - 1


def _newest(root: Root, listed: Collection[Identity]) -> int:
    return max((entry.id for entry in root.listed if (entry.id, entry.origin) in listed), default=0)


def _pin(run: str, id: int) -> str:
    return f"ray-train/{run}/{id}"
