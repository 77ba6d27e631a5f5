"""Exports of versions while a training runs. A failed export is reported and tried again; it affects no save.

The root lists an export before it is begun. So a coordinator that follows a killed one ends what that has begun: it completes the
export, finds it complete, or deletes its part. One to another address stays listed until a run exports there. It never works for
a run that was fenced.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ...storage.commit.catalog import Catalog
from ...storage.errors import RaystowError, StoreError
from ...storage.format.root import Entry, Root
from ...storage.log import about
from ...storage.retention.policy import Best
from ...storage.runtime import metrics
from ...storage.runtime.clock import SYSTEM, Clock
from ...storage.runtime.spans import span
from ...storage.stores.settings import JobSettings
from ...workers.protocol.messages import ExportOrder
from ..export.destination import Destination
from ..export.hf_folder import plan_folder

logger = logging.getLogger(__name__)

_LISTED = 256
"""Exports that the root lists: the newest ones."""
_FAILED = 8  # failed ones
_LONGEST = 500  # characters of an error

RETRY, TRIES = 30.0, 6
"""Seconds after which a failed export is tried again, twice as many after each failure, and how often until the next commit."""


@dataclass(frozen=True)
class _Requested:
    """The arguments of ``request``."""

    order: ExportOrder
    best: Best | None
    trace: str

    def covers(self, place: str) -> bool:
        """Whether an address is below that of the exports."""
        return f"{place}/".startswith(f"{os.fspath(self.order.export.uri).rstrip('/')}/")

    def still_failed(self, root: Root, open: Mapping[str, int]) -> dict[str, str]:
        """The failures that stay listed after a newer export: those of ``open`` exports, and of exports elsewhere."""
        return {place: error for place, error in root.failed_exports.items() if place in open or not self.covers(place)}


class Exports:
    """The exports of one repository. Call ``run`` when ``due``, from one thread at a time.

    Args:
        catalog: The repository.
        settings: Those of its store. Stores of the same kind are reached with them, too.
        in_charge: Whether a root, which was just read, is that of this coordinator's epoch.

    Attributes:
        failures: What the next save warns of.
        ordered: Whether there was any request.
    """

    def __init__(
        self,
        catalog: Catalog,
        settings: JobSettings | None = None,
        clock: Clock = SYSTEM,
        *,
        in_charge: Callable[[Root], bool] = lambda root: True,
    ) -> None:
        self._catalog, self._settings, self._clock, self._in_charge = catalog, settings, clock, in_charge
        self._requested: _Requested | None = None
        self.ordered = False
        self._tries, self._next, self._lock = 0, 0.0, threading.Lock()
        self.failures = deque[str](maxlen=1)
        self._numbers: dict[Entry, float | None] = {}
        self._log = about(logger, repository=catalog.uri)

    def request(self, order: ExportOrder, best: Best | None, trace: str = "") -> None:
        """Let the version that is due be exported. ``best``: see ``Export.due``. ``trace``: of the span of the newest save."""
        with self._lock:
            self._requested, self._tries, self._next = _Requested(order, best, trace), 0, self._clock.monotonic()
            self.ordered = True

    @property
    def waiting(self) -> bool:
        """Whether an export is requested, or will be tried again."""
        return self._requested is not None

    @property
    def due(self) -> bool:
        """Whether to call ``run`` now."""
        return self.waiting and self._clock.monotonic() >= self._next

    def run(self) -> None:
        """Export the version that is due, if any, and end the exports that were begun before."""
        if (requested := self._requested) is None:
            return
        failed = self._export(requested)
        with self._lock:
            if self._requested is not requested:  # meanwhile there was another commit
                return
            self._next, self._tries = self._clock.monotonic() + RETRY * 2**self._tries, self._tries + 1
            if not failed or self._tries == TRIES:
                self._requested = None

    def _export(self, requested: _Requested) -> bool:
        """Return whether to try again."""
        export, uri = requested.order.export, os.fspath(requested.order.export.uri)
        try:
            root = self._catalog.root()
            if not self._in_charge(root):
                self._log.info("nothing is exported: another run has the repository, or a repair has just replaced its root")
                return True
            numbers = self._metric(root, requested.best) if requested.best is not None else {}
        except (RaystowError, OSError) as error:
            self._report(requested, uri, error, again=True)
            return True
        due = export.due(root, numbers, requested.best)
        # Addresses in the root are compared, and not used: who can write it must not choose what is deleted.
        places = {place: id for place, id in root.open_exports.items() if place == export.place(id)}
        if due is not None:
            places[export.place(due.id)] = due.id
        failed, entries = False, {entry.id: entry for entry in root.listed}
        for place, id in places.items():
            try:
                if id in entries:
                    self._complete(requested, root, place, entries[id])
                else:  # its version was dropped
                    self._discard(place, id)
            except (RaystowError, OSError) as error:
                open = self._stays_open(error, place, id)
                again = open or (due is not None and id == due.id)
                self._report(requested, place, error, again=again)
                failed = failed or again
        return failed

    def _complete(self, requested: _Requested, root: Root, place: str, entry: Entry) -> None:
        """Export a version, or find that it is exported, and note it in the root."""
        if place not in root.open_exports:
            self._catalog.register.update(lambda now: replace(now, open_exports={**now.open_exports, place: entry.id}))
        with span("export", requested.trace, version=entry.id, to=place):
            self._write(requested.order, entry, root, place)

        def noted(now: Root) -> Root:
            open, exports = _without(now.open_exports, place), {**_without(now.exports, place), place: entry.id}
            listed, failed = dict([*exports.items()][-_LISTED:]), requested.still_failed(now, open)
            return replace(now, open_exports=open, exports=listed, failed_exports=failed)

        self._catalog.register.update(noted)
        self._log.info("version %d is exported to %s", entry.id, place, extra={"version": entry.id, "step": entry.step})

    def _stays_open(self, error: Exception, place: str, id: int) -> bool:
        """Whether a part of a failed export may be left. It stays where the next try can continue it; else it is deleted."""
        if isinstance(error, StoreError | OSError):
            return True
        try:
            self._discard(place, id)
        except (RaystowError, OSError) as failure:
            self._log.warning("the part of an export to %s is deleted later: %s", place, failure)
            return True
        return False

    def _discard(self, place: str, id: int) -> None:
        """Delete the part of an export that no other try can continue, and list it no more."""
        Destination.parse("export", place, settings=self._settings).discard(f"{self._catalog.id}/{id}")
        self._catalog.register.update(lambda now: replace(now, open_exports=_without(now.open_exports, place)))

    def _report(self, requested: _Requested, place: str, error: Exception, *, again: bool) -> None:
        """Log a failed export, and note it in the root. ``again``: whether it is tried again."""
        what = f"an export to {place} failed{', and is tried again' if again else ''}: {error}"
        metrics.record(metrics.FAILED_EXPORTS, repository=self._catalog.uri)
        self._log.error("%s", what)
        self.failures.append(what)

        def noted(now: Root) -> Root:
            earlier = _without(requested.still_failed(now, now.open_exports), place)
            failures = {**earlier, place: str(error)[:_LONGEST]}
            return replace(now, failed_exports=dict([*failures.items()][-_FAILED:]))

        with contextlib.suppress(RaystowError):  # the store may be what has failed
            self._catalog.register.update(noted)

    def _write(self, order: ExportOrder, entry: Entry, root: Root, place: str) -> None:
        export, version = order.export, self._catalog.at(entry, siblings=root.listed)
        with self._catalog.lease(version), tempfile.TemporaryDirectory(prefix="raystow-export-") as folder:
            for name, data in order.files.items():
                Path(folder, Path(name).name).write_bytes(data)
            source = Path(folder) if order.files else None
            plan = plan_folder(version, prefix=export.prefix, dtype=export.dtype, source=source, limit=export.max_shard_size)
            plan.refuse_unloadable()
            with Destination.parse("export", place, settings=self._settings).new(plan.plan) as output:
                plan.write(output, lambda nbytes: None)

    def _metric(self, root: Root, best: Best) -> dict[int, float]:
        """The metric of each live version that has it as a number."""
        self._numbers = {entry: self._numbers.get(entry, math.nan) for entry in root.versions}
        for entry, known in self._numbers.items():
            if known is not None and math.isnan(known):
                value = self._catalog.at(entry, siblings=root.listed).metrics.get(best[0])
                number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
                self._numbers[entry] = None if number is None or math.isnan(number) else number
        return {entry.id: number for entry, number in self._numbers.items() if number is not None}


_T = TypeVar("_T")


def _without(by_place: dict[str, _T], place: str) -> dict[str, _T]:
    return {other: value for other, value in by_place.items() if other != place}
