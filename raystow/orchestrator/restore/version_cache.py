"""The versions and pins of a repository, also while the store does not answer: versions in memory can be restored without it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout

from ...storage.errors import StoreUnavailable
from ...storage.format.root import Entry, Root
from ...storage.log import about
from ...storage.repository import Repository

logger = logging.getLogger(__name__)


class VersionCache:
    """Call ``root`` from one thread, ``committed`` from any. ``on_read``: called with each root; returns the newest one.
    ``timeout``: seconds to wait for the root."""

    def __init__(
        self, repository: Repository, *, on_read: Callable[[Root], Root] = lambda root: root, timeout: float = 20.0
    ) -> None:
        self._repository, self._on_read, self._timeout = repository, on_read, timeout
        self._pool = ThreadPoolExecutor(1, "raystow-root")
        self._last: Root | None = None
        self._taking = threading.Lock()  # so that the root taken last is the newest

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The versions known last, oldest first, rolled-back ones included."""
        return self._last.listed if self._last is not None else ()

    @property
    def newest(self) -> Entry | None:
        return self._last.versions[-1] if self._last is not None and self._last.versions else None

    def committed(self, root: Root) -> None:
        """Take the root that a commit has left or, if it was refused, found."""
        with self._taking:
            self._last = self._on_read(root)

    def root(self) -> tuple[Root, bool]:
        """The root, and whether the store has answered; else it has the versions known last.

        Raises ``StoreUnavailable`` if the store does not answer and never did.
        """
        reading = self._pool.submit(self._repository.root)  # after a read that still waits: its result may be old
        try:
            root = reading.result(self._timeout)
            with self._taking:
                self._last = root = self._on_read(root)  # another one if a commit was faster
        except (StoreUnavailable, FuturesTimeout) as error:
            reading.cancel()
            what = str(error) or f"the store has not returned the root within {self._timeout:.0f} s"
            if self._last is None:
                raise StoreUnavailable(what, subject=self._repository.uri, remedy="try again later") from error
            log = about(logger, repository=self._repository.uri)
            log.warning("restoring from known versions, since the store does not answer: %s", what)
            return self._last, False
        return root, True
