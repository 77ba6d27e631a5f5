"""Which versions there are, also while the store does not say: what is in memory can be restored all the same."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout

from ..storage.errors import StoreUnavailable
from ..storage.format.root import Entry
from ..storage.log import about
from ..storage.repository import Repository

logger = logging.getLogger(__name__)


class Known:
    """``versions`` from one thread; ``committed`` from any. ``patience``: the seconds that the root is waited for."""

    def __init__(self, repository: Repository, *, patience: float = 20.0) -> None:
        self._repository, self._patience = repository, patience
        self._pool = ThreadPoolExecutor(1, "raystow-root")
        self._last: tuple[Entry, ...] | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The versions that were heard of last, oldest first."""
        return self._last or ()

    @property
    def newest(self) -> Entry | None:
        """The newest version that was heard of."""
        return self._last[-1] if self._last else None

    def committed(self, entry: Entry) -> None:
        """A version was made just now."""
        if self._last is not None:
            self._last = (*self._last, entry)

    def versions(self) -> tuple[tuple[Entry, ...], bool]:
        """The versions, oldest first, and whether the store has said so: else they are those that were known last.

        ``StoreUnavailable`` if the store does not answer and has never been asked before.
        """
        reading = self._pool.submit(self._repository.root)  # behind one that still waits: what that says may be old
        try:
            self._last = reading.result(self._patience).versions
        except (StoreUnavailable, FuturesTimeout) as error:
            reading.cancel()
            what = str(error) or f"the store has not said within {self._patience:.0f} s which versions there are"
            if self._last is None:
                raise StoreUnavailable(what, subject=self._repository.uri, remedy="try again later") from error
            log = about(logger, repository=self._repository.uri)
            log.warning("restoring what is known of, since the store cannot be asked: %s", what)
            return self._last, False
        return self._last, True
