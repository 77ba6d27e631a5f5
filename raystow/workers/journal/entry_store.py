"""The entries in this node's memory: those of its own ranks, and copies of those of other nodes.

The budget is hard. A new entry that does not fit is refused, since entries are useful only without gaps after a version: dropping
the oldest would make all later ones useless. Only entries that a save under way makes unnecessary, that the store has, or of a
repository whose steps are not recorded here now are dropped for new ones: nodes that rely on such copies must be informed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ...storage.object_store import Buffer
from ..protocol.messages import START, EntryInfo, Generation, generation_of

logger = logging.getLogger(__name__)

Line = tuple[str, int, int]
"""Repository, number of ranks, rank."""


@dataclass
class KeptEntry:
    """``own``: a rank of this node has recorded or fetched it, so that this node sees to its copies. ``stored``: the store has
    it as well."""

    info: EntryInfo
    content: memoryview
    own: bool
    stored: bool = False


class EntryStore:
    """Thread-safe. ``budget``: bytes.

    Attributes:
        evictions: How many entries were dropped for those of another repository.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.used, self.evictions = budget, 0, 0
        self._lock = threading.RLock()
        self._recording: Counter[str] = Counter()  # by repository: connected training processes
        self._lines: dict[Line, dict[str, KeptEntry]] = {}
        self._saving: dict[str, tuple[int, Generation]] = {}  # by repository: the newest save that has begun
        self._needless: dict[Line, EntryInfo] = {}  # the newest entry that was dropped because nobody needs it

    @contextlib.contextmanager
    def recording(self, repository: str) -> Iterator[None]:
        """Drop nothing of a repository for entries of others during the block: a training process records its steps."""
        with self._lock:
            self._recording[repository] += 1
        try:
            yield
        finally:
            with self._lock:
                self._recording[repository] -= 1

    def add(self, info: EntryInfo, content: Buffer, *, own: bool, live: Collection[str] = ()) -> str:
        """Keep an entry, whose bytes nobody changes from then on; return why it is not kept, else an empty text. ``live``: see
        ``problem``."""
        with self._lock:
            line = self._lines.get(_line(info), {})
            if info.key in line:
                line[info.key].own |= own
                return ""
            self._drop([kept for kept in line.values() if info.replaces(kept.info)])
            problem = self.problem(info, live)
            if not problem:
                kept = KeptEntry(info, memoryview(content).toreadonly(), own)
                self._lines.setdefault(_line(info), {})[info.key] = kept
                self.used += info.size
            return problem

    def stored(self, newest: EntryInfo, step: int) -> None:
        """Note that the store has the entries up to a step, from which ``newest`` descends."""
        with self._lock:
            for kept in self._descent(newest):
                kept.stored |= kept.info.step <= step

    def descent(self, newest: EntryInfo, after: int) -> list[EntryInfo]:
        """The entries from which ``newest`` descends and itself, oldest first, as far as they are here without a gap and start
        from step ``after`` or a later one."""
        with self._lock:
            found = [kept.info for kept in self._descent(newest) if kept.info.previous >= after]
        return found[::-1]

    def needed(self, newest: EntryInfo) -> list[EntryInfo]:
        """As ``descent``, without the entries that a save under way makes unnecessary."""
        with self._lock:
            return self.descent(newest, self._saving_step(newest))

    def problem(self, info: EntryInfo, live: Collection[str] = ()) -> str:
        """Make place for an entry; return why it cannot be kept, else an empty text. ``live``: repositories whose entries are
        not dropped for it."""
        with self._lock:
            needed = self.used + info.size
            spare = self._spare(info, live) if needed > self.budget else []
            if needed - sum(kept.info.size for kept in spare) > self.budget:
                return f"the memory for entries of recorded steps is full ({self.used} of {self.budget} bytes): save a version"
            for kept in spare:
                if self.used + info.size > self.budget:
                    self._drop([kept], needless=True)
                    self.evictions += kept.info.repository != info.repository
            return ""

    def save_begun(self, repository: str, step: int, generation: Generation) -> None:
        """Note that a save of the state after a step is under way. ``generation``: of the entries that are recorded now."""
        with self._lock:
            self._saving[repository] = step, generation

    def save_failed(self, repository: str, step: int) -> None:
        """Note that a save is not under way any more."""
        with self._lock:
            if repository in self._saving and self._saving[repository][0] == step:
                del self._saving[repository]

    def committed(self, repository: str, step: int) -> None:
        """Drop the entries up to the step of a version that is durable now."""
        with self._lock:
            self._drop([kept for kept in self._of(repository) if kept.info.step <= step], needless=True)

    def drop_before(self, info: EntryInfo, oldest: int) -> None:
        """Drop the copies of a rank's entries that the node that recorded them has dropped: those before step ``oldest``."""
        with self._lock:
            line = self._lines.get(_line(info), {})
            self._drop([kept for kept in line.values() if kept.info.step < oldest and not kept.own])

    def holdings(self, repository: str) -> tuple[EntryInfo, ...]:
        """All entries of a repository."""
        with self._lock:
            return tuple(kept.info for kept in self._of(repository))

    def own(self) -> list[EntryInfo]:
        """The entries to whose copies this node sees, those of each rank oldest first."""
        with self._lock:
            found = [kept.info for kept in self._all() if kept.own]
        return sorted(found, key=lambda info: info.step)

    def newest(self, repository: str) -> int | None:
        """The newest step that a rank of this node has recorded; None if there is none."""
        with self._lock:
            return max((kept.info.step for kept in self._of(repository) if kept.own), default=None)

    def newest_unstored(self, repository: str) -> int | None:
        """The newest step of which the store may have no entry; None if there is none."""
        with self._lock:
            return max((kept.info.step for kept in self._of(repository) if not kept.stored), default=None)

    def repositories(self) -> set[str]:
        """The repositories of which there are entries."""
        with self._lock:
            return {kept.info.repository for kept in self._all()}

    def has(self, info: EntryInfo) -> bool:
        """Whether an entry is here."""
        with self._lock:
            return info.key in self._lines.get(_line(info), {})

    def oldest(self, info: EntryInfo) -> int:
        """The first step of the same rank that may be needed. Not the first one here: a restarted node has none of those whose
        copies are on other nodes."""
        with self._lock:
            dropped = self._needless.get(_line(info))
        if dropped is None or generation_of(info.lineage, dropped.step) not in (None, dropped.generation):
            return START + 1  # the training has gone back to a step before the dropped one
        return dropped.step + 1

    def view(self, info: EntryInfo) -> memoryview | None:
        """The bytes of an entry; None if it is not here."""
        with self._lock:
            kept = self._lines.get(_line(info), {}).get(info.key)
            return None if kept is None else kept.content

    def named(self, repository: str, key: str) -> memoryview | None:
        """The bytes of the entry with a key; None if it is not here."""
        with self._lock:
            return next((kept.content for kept in self._of(repository) if kept.info.key == key), None)

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._drop(self._all())

    def _saving_step(self, info: EntryInfo) -> int:
        """The step of the newest save of an entry's training that has begun; ``START`` if it has ended with its process."""
        step, generation = self._saving.get(info.repository, (START, None))
        return step if generation == info.generation else START

    def _spare(self, info: EntryInfo, live: Collection[str]) -> list[KeptEntry]:
        """What may be dropped for a new entry; what is of other repositories, whose trainings have ended here, comes last."""
        saving = self._saving_step(info)

        def droppable(kept: KeptEntry) -> bool:
            if kept.info.repository != info.repository:
                return not self._recording[kept.info.repository] and kept.info.repository not in live
            return kept.stored or kept.info.step <= saving

        return sorted(filter(droppable, self._all()), key=lambda kept: (kept.info.repository != info.repository, kept.info.step))

    def _descent(self, newest: EntryInfo) -> Iterator[KeptEntry]:
        line = self._lines.get(_line(newest), {})
        by_step: dict[tuple[int, Generation | None], KeptEntry]
        by_step = {(kept.info.step, kept.info.generation): kept for kept in line.values()}
        kept = line.get(newest.key)
        while kept is not None:
            yield kept
            previous = kept.info.previous
            kept = by_step.get((previous, generation_of(newest.lineage, previous)))

    def _all(self) -> list[KeptEntry]:
        return [kept for line in self._lines.values() for kept in line.values()]

    def _of(self, repository: str) -> list[KeptEntry]:
        return [kept for kept in self._all() if kept.info.repository == repository]

    def _drop(self, entries: list[KeptEntry], *, needless: bool = False) -> None:
        for kept in entries:
            line = self._lines.get(_line(kept.info), {})
            if needless:
                known = self._needless.get(_line(kept.info), kept.info)
                self._needless[_line(kept.info)] = max(known, kept.info, key=lambda info: (info.generation, info.step))
            if line.pop(kept.info.key, None) is not None:
                self.used -= kept.info.size
            if not line:
                self._lines.pop(_line(kept.info), None)


def _line(info: EntryInfo) -> Line:
    return info.repository, info.world_size, info.rank
