"""Leases keep a version's objects in the store while they are read, even if the version is dropped meanwhile.

A reader writes its lease, then checks that the version is in the root, then reads. Retention looks for leases before it drops.
Collection drops first, then looks for leases, then deletes. So either the reader sees that the version is gone, or the collection
sees the lease. The lease of a reader that dies ends by itself.
"""

from __future__ import annotations

import json
import logging
import platform
import threading
from types import TracebackType

from ..errors import NotFound, StoreError
from ..format import keys
from ..object_store import ObjectStore
from ..runtime import background
from ..runtime.clock import Clock

logger = logging.getLogger(__name__)

SECONDS = 3600.0
"""The time that a lease lasts after its last renewal, by the store's clock."""


class Lease:
    """A lease on one version. As a context manager it renews itself on a thread, each ``renew_after`` seconds; else call
    ``renew`` in time."""

    def __init__(self, store: ObjectStore, id: int, attempt: str, clock: Clock, *, renew_after: float = 600.0) -> None:
        self._renew_after = renew_after
        self._store, self._key = store, keys.lease(id, attempt, clock.token())
        self._body = json.dumps({"holder": platform.node(), "version": id}).encode()
        self._done = threading.Event()

    def renew(self) -> None:
        """Write the lease, for the first time or again. Raises what ``put`` raises."""
        self._store.put(self._key, [self._body])

    def release(self) -> None:
        """End it. A lease that cannot be removed ends by itself."""
        try:
            self._store.delete([self._key])
        except (NotFound, StoreError) as error:
            logger.info("a lease could not be removed, and ends by itself: %s", error)

    def __enter__(self) -> Lease:
        self._try_to_renew()
        background.repeat("raystow-lease", self._keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self.release()

    def _keep(self) -> bool:
        if self._done.wait(self._renew_after):
            return False
        self._try_to_renew()
        if self._done.is_set():  # it was released meanwhile, perhaps before it was written again
            self.release()
        return True

    def _try_to_renew(self) -> None:
        try:
            self.renew()
        except (NotFound, StoreError) as error:  # a reader may have no right to write
            logger.warning("reading without a lease: a collection may delete the version meanwhile: %s", error)


def held(store: ObjectStore, now: float) -> set[tuple[int, str]]:
    """The versions (id, attempt) under a lease at ``now``, seconds since 1970 by the store's clock."""
    return {
        version
        for info in store.list(keys.LEASES)
        if now < info.modified + SECONDS and (version := keys.leased(info.key)) is not None
    }


def ended(store: ObjectStore, now: float) -> list[str]:
    """The keys of leases that have ended."""
    return [info.key for info in store.list(keys.LEASES) if keys.leased(info.key) and now >= info.modified + SECONDS]
