"""Exports of versions while a training runs. A failed export is reported and tried again; it affects no save."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...storage.commit.catalog import Catalog
from ...storage.errors import RaystowError
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


class Exports:
    """The exports of one repository. Call ``request`` after a commit, and ``run`` when ``due``, from one thread at a time.

    Args:
        catalog: The repository.
        settings: Those of its store. Stores of the same kind are reached with them, too.

    Attributes:
        failures: What the next save warns of.
    """

    def __init__(self, catalog: Catalog, settings: JobSettings | None = None, clock: Clock = SYSTEM) -> None:
        self._catalog, self._settings, self._clock = catalog, settings, clock
        self._requested: tuple[ExportOrder, Best | None, str] | None = None
        self._tries, self._next, self._lock = 0, 0.0, threading.Lock()
        self.failures = deque[str](maxlen=1)
        self._numbers: dict[Entry, float | None] = {}
        self._log = about(logger, repository=catalog.uri)

    def request(self, order: ExportOrder, best: Best | None, trace: str = "") -> None:
        """Let the version that is due be exported. ``best``: see ``Export.due``. ``trace``: of the span of the newest save."""
        with self._lock:
            self._requested, self._tries, self._next = (order, best, trace), 0, self._clock.monotonic()

    @property
    def waiting(self) -> bool:
        """Whether an export is requested, or will be tried again."""
        return self._requested is not None

    @property
    def due(self) -> bool:
        """Whether to call ``run`` now."""
        return self.waiting and self._clock.monotonic() >= self._next

    def run(self) -> None:
        """Export the version that is due, if any."""
        if (requested := self._requested) is None:
            return
        failed = self._export(*requested)
        with self._lock:
            if self._requested is not requested:  # meanwhile there was another commit
                return
            self._next, self._tries = self._clock.monotonic() + RETRY * 2**self._tries, self._tries + 1
            if not failed or self._tries == TRIES:
                self._requested = None

    def _export(self, order: ExportOrder, best: Best | None, trace: str) -> bool:
        """Return whether the export has failed."""
        place = uri = os.fspath(order.export.uri)
        try:
            root = self._catalog.root()
            entry = order.export.due(root, self._metric(root, best) if best is not None else {}, best)
            if entry is None:
                return False
            place = order.export.place(entry)
            with span("export", trace, version=entry.id, to=place):
                self._write(order, entry, root, place)
            self._note(uri, exported={place: entry.id}, failed={})
        except (RaystowError, OSError) as error:
            what = f"an export to {place} failed, and is tried again: {error}"
            metrics.record(metrics.FAILED_EXPORTS, repository=self._catalog.uri)
            self._log.error("%s", what)
            self.failures.append(what)
            with contextlib.suppress(RaystowError):  # the store may be what has failed
                self._note(uri, exported={}, failed={place: str(error)[:_LONGEST]})
            return True
        self._log.info("version %d is exported to %s", entry.id, place, extra={"version": entry.id, "step": entry.step})
        return False

    def _note(self, uri: str, *, exported: Mapping[str, int], failed: Mapping[str, str]) -> None:
        """Note in the root what was exported to ``uri``, or what has failed there last."""

        def noted(now: Root) -> Root:
            here = f"{uri.rstrip('/')}/"
            elsewhere = {place: error for place, error in now.failed_exports.items() if not f"{place}/".startswith(here)}
            exports, failures = {**now.exports, **exported}, {**elsewhere, **failed}
            newest, latest = [*exports.items()][-_LISTED:], [*failures.items()][-_FAILED:]
            return replace(now, exports=dict(newest), failed_exports=dict(latest))

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
