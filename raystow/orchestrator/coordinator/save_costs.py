"""What the saves and failures of a run cost so far, and the interval between saves that follows from it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from ...storage.commit.catalog import Catalog
from ...storage.errors import RaystowError
from ...storage.format.version_record import RestoreInfo, VersionRecord
from ...storage.versions.version import Version
from ...workers.protocol.messages import AskNextSave
from ..save_interval import LEAST, best_interval, time_between_failures

logger = logging.getLogger(__name__)

_RECORDS, _READERS = 64, 16  # versions read, and threads that read them
_RECENT = 16  # saves whose medians count


def newest_records(catalog: Catalog) -> list[VersionRecord]:
    """The records of the newest versions that can be read, oldest first; none if the store does not answer."""

    def record(version: Version) -> VersionRecord | None:
        try:
            return version.record
        except RaystowError as error:
            logger.info("version %d is not counted: %s", version.id, error)
            return None

    try:
        versions = [catalog.at(entry) for entry in catalog.root().versions[-_RECORDS:]]
    except RaystowError as error:
        logger.warning("the interval between saves does not count earlier versions: %s", error)
        return []
    with ThreadPoolExecutor(_READERS, "raystow-records") as pool:
        return [found for found in pool.map(record, versions) if found is not None]


class SaveCosts:
    """Not thread-safe. ``began``: when the run began, in seconds since 1970."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._stalls: deque[float] = deque(maxlen=_RECENT)
        self._durable: deque[float] = deque(maxlen=_RECENT)
        self._restores: set[tuple[float, int]] = set()  # when, and which version: once, however often it is reported
        self.recalled = False
        """Whether ``recall`` was called."""

    def recall(self, records: Sequence[VersionRecord]) -> None:
        """Add what the records of earlier versions tell, oldest first."""
        self.recalled = True
        self._began = min((self._began, *(record.created for record in records)))
        self.restored([one for record in records for one in record.restores if one.at > self._began])
        stalls = [record.stall for record in records if record.stall is not None]
        self._stalls = deque((*stalls, *self._stalls), _RECENT)

    def saved(self, stall: float | None, durable: float, *, cold: bool) -> None:
        """A save became a version: the seconds that it held up the training and those until it was durable. ``cold``: a process
        saved for the first time, which takes longer."""
        if not cold:
            self._stalls.extend([stall] if stall is not None else [])
            self._durable.append(durable)

    def restored(self, restores: Sequence[RestoreInfo]) -> None:
        """The run has restored, probably after a failure."""
        self._restores.update((one.at, one.version) for one in restores)

    def interval(self, ask: AskNextSave, ranks: int, now: float) -> float:
        """The seconds from save to save, as a rank asks for; ``now``: in seconds since 1970."""
        if ask.seconds is not None:
            return ask.seconds
        if not self._stalls:
            return LEAST
        mtbf = ask.mtbf or time_between_failures(now - self._began, len(self._restores), ranks)
        durable = median(self._durable) if self._durable else 0.0
        least = durable if ask.mtbf else max(durable, LEAST)
        return best_interval(median(self._stalls), mtbf, ask.budget, least=least)
