"""Exports of versions while a training runs. A failure is logged and counted; it affects no save."""

from __future__ import annotations

import logging
import math
import tempfile
from dataclasses import replace
from pathlib import Path

from ...storage.commit.catalog import Catalog
from ...storage.errors import RaystowError
from ...storage.format.root import Entry, Root
from ...storage.log import about
from ...storage.retention.policy import Best
from ...storage.runtime import metrics
from ...storage.runtime.spans import span
from ...storage.stores.settings import JobSettings
from ...workers.protocol.messages import ExportOrder
from ..export.destination import Destination
from ..export.hf_folder import plan_folder

logger = logging.getLogger(__name__)

_LISTED = 256
"""Exports that the root lists: the newest ones."""


class Exports:
    """The exports of one repository. Call ``run`` after a commit, from one thread at a time.

    Args:
        catalog: The repository.
        settings: Those of its store. Stores of the same kind are reached with them, too.
    """

    def __init__(self, catalog: Catalog, settings: JobSettings | None = None) -> None:
        self._catalog, self._settings = catalog, settings
        self._numbers: dict[Entry, float | None] = {}
        self._log = about(logger, repository=catalog.uri)

    def run(self, order: ExportOrder, best: Best | None, trace: str = "") -> None:
        """Export the version that is due, if any. ``best``: see ``Export.due``. ``trace``: of the span of the newest save."""
        place = order.export.uri
        try:
            root = self._catalog.root()
            entry = order.export.due(root, self._metric(root, best) if best is not None else {}, best)
            if entry is None:
                return
            place = order.export.place(entry)
            with span("export", trace, version=entry.id, to=place):
                self._write(order, entry, root, place)
            self._catalog.register.update(
                lambda now: replace(now, exports=dict([*now.exports.items(), (place, entry.id)][-_LISTED:]))
            )
        except (RaystowError, OSError) as error:
            metrics.record(metrics.FAILED_EXPORTS, repository=self._catalog.uri)
            self._log.error("an export to %s failed, and is tried again after the next commit: %s", place, error)
        else:
            self._log.info("version %d is exported to %s", entry.id, place, extra={"version": entry.id, "step": entry.step})

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
