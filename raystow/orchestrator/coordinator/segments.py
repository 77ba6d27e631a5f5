"""Segments of the step journal: gathers what ranks have stored, and finds what the store has for a replay.

At most one segment is open. All ranks store the entries up to its last step; then it is committed. Its number is reserved when it
is opened, and a later one is opened only when it is over, so segments are committed in the order of their numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...storage.commit.catalog import Catalog
from ...storage.commit.committer import Committer
from ...storage.commit.segments import read_record, verify_segment
from ...storage.errors import RaystowError, SaveFailed
from ...storage.format.root import Root, Segment
from ...storage.format.segment_record import RankEntries, RecordedStep, SegmentRecord
from ...storage.log import about
from ...storage.runtime.clock import Clock
from ...workers.protocol.messages import START, EntryInfo, Generation, SegmentStored, SegmentTicket, StoredEntry, generation_of

logger = logging.getLogger(__name__)

_LONGEST = 600.0  # seconds after which another segment takes the place of an open one


@dataclass
class OpenedSegment:
    """A segment that ranks are storing. ``rollbacks``: those of the repository that were noticed when it was opened."""

    number: int
    attempt: str
    newest: EntryInfo
    after: int
    deadline: float
    rollbacks: int
    parts: dict[int, tuple[EntryInfo, ...]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all ranks have stored their entries."""
        return len(self.parts) == self.newest.world_size


class Segments:
    """The segments of one repository. Not thread-safe, except for ``commit``."""

    def __init__(self, committer: Committer, clock: Clock) -> None:
        self._committer, self._clock = committer, clock
        self._open: OpenedSegment | None = None
        self._log = about(logger, repository=committer.catalog.uri)

    @property
    def in_use(self) -> bool:
        """Whether a segment is open."""
        return self._open is not None

    def open(self, newest: EntryInfo) -> SegmentTicket:
        """A rank can store its entries up to ``newest``: what it is to store now."""
        root = self._committer.root
        after = durable_step(root, newest.lineage)
        nothing = SegmentTicket(0, "", after, newest.step)
        if after >= newest.step:
            return nothing
        opened = self._open
        if opened is not None and (opened.newest.step <= after or self._is_over(opened, newest)):
            opened = self._open = None
        if opened is None:
            number, attempt = self._committer.reserve_segment()
            deadline = self._clock.monotonic() + _LONGEST
            opened = OpenedSegment(number, attempt, newest, after, deadline, self._committer.rollbacks)
            self._open = opened
        another = (opened.newest.world_size, opened.newest.generation) != (newest.world_size, newest.generation)
        if another or newest.rank in opened.parts or opened.newest.step > newest.step:
            return nothing
        return SegmentTicket(opened.number, opened.attempt, after, opened.newest.step)

    def stored(self, part: SegmentStored) -> None:
        """A rank has stored its entries. Raises ``SaveFailed`` if the segment is not open any more."""
        opened = self._open
        if opened is None or (opened.number, opened.attempt) != (part.number, part.attempt):
            raise SaveFailed("it is not open any more", subject=f"segment {part.number}")
        opened.parts[part.rank] = part.entries

    def next_commit(self) -> OpenedSegment | None:
        """The segment to commit now. Call ``settled`` then."""
        return self._open if self._open is not None and self._open.complete else None

    def settled(self, opened: OpenedSegment) -> None:
        """The commit of a segment is over, successful or not."""
        if self._open is opened:
            self._open = None

    def commit(self, opened: OpenedSegment) -> None:
        """Make a complete segment durable, or log why it is not."""
        step, catalog = opened.newest.step, self._committer.catalog
        try:
            base = max(opened.after, durable_step(self._committer.root, opened.newest.lineage))
            record = segment_record(opened, catalog.id, self._committer.epoch, base, self._clock)
            verify_segment(catalog.store, record, deep=False)  # a node may see another folder
            segment = self._committer.commit_segment(record, opened.rollbacks)
        except RaystowError as error:
            self._log.warning("the steps up to %d are not durable yet: %s", step, error, extra={"step": step})
            return
        if segment is not None:
            self._log.info("the steps up to %d are durable: %d bytes", step, segment.stored, extra={"step": step})

    def _is_over(self, opened: OpenedSegment, newest: EntryInfo) -> bool:
        """Whether a segment that is not complete is given up: it is late, or the training has been restarted since."""
        late = self._clock.monotonic() > opened.deadline
        return not opened.complete and (late or newest.generation > opened.newest.generation)


def durable_step(root: Root, lineage: Sequence[Generation]) -> int:
    """The last step that versions and segments of a lineage have; ``START`` if there is none."""
    newest = [entry.step for entry in root.versions[-1:]]
    recorded = ((one, generation_of(lineage, one.step)) for one in root.segments)
    return max([START, *newest, *(one.step for one, of in recorded if of is not None and of.token == one.generation)])


def segment_record(opened: OpenedSegment, repository: str, epoch: int, base: int, clock: Clock) -> SegmentRecord:
    """The record of a complete segment. Raises ``SaveFailed`` unless the entries of each rank lead from the state of step
    ``base``, which is durable, to the last step."""
    steps: dict[int, RecordedStep] = {}
    ranks = list[RankEntries]()
    for rank in range(opened.newest.world_size):
        entries, subject = opened.parts[rank], f"segment {opened.number}, rank {rank}"
        for info in entries:
            row = RecordedStep(
                info.step,
                tuple(one.token for one in info.lineage),
                tuple(one.first for one in info.lineage),
                None if info.previous == START else info.previous,
            )
            if steps.setdefault(info.step, row) != row or (info.rank, info.world_size) != (rank, opened.newest.world_size):
                raise SaveFailed(f"its step {info.step} is not that of the other ranks", subject=subject)
        after = [info for info in entries if info.step > base]
        reached = [base, *(info.step for info in after)]
        if [*(info.previous for info in after), opened.newest.step] != reached:
            raise SaveFailed(f"the entries do not lead from step {base} to {opened.newest.step}", subject=subject)
        sizes, digests = tuple(info.size for info in entries), tuple(info.digest.hex() for info in entries)
        ranks.append(RankEntries(rank, tuple(info.step for info in entries), sizes, digests))
    order = {step: number for number, step in enumerate(sorted(steps))}
    return SegmentRecord(
        repository=repository,
        number=opened.number,
        attempt=opened.attempt,
        epoch=epoch,
        created=clock.now(),
        steps=tuple(steps[step] for step in order),
        ranks=tuple(RankEntries(one.rank, tuple(order[step] for step in one.steps), one.sizes, one.digests) for one in ranks),
    )


def stored_entries(catalog: Catalog, root: Root) -> dict[EntryInfo, StoredEntry]:
    """The entries that the store has after the newest version. Segments whose records cannot be read are logged and left out."""
    found: dict[EntryInfo, StoredEntry] = {}
    for segment in root.segments:
        try:
            record = read_record(catalog.store, catalog.id, segment, catalog.trust)
        except RaystowError as error:
            step = segment.step
            about(logger, repository=catalog.uri).warning("steps up to %d cannot be read: %s", step, error, extra={"step": step})
            continue
        found.update(_entries(segment, record))
    return found


def _entries(segment: Segment, record: SegmentRecord) -> Iterator[tuple[EntryInfo, StoredEntry]]:
    lineages = [tuple(map(Generation, step.tokens, step.firsts)) for step in record.steps]
    for one in record.ranks:
        for number, (start, size), digest in zip(one.steps, one.places(), one.digests, strict=True):
            step = record.steps[number]
            previous = START if step.previous is None else step.previous
            of = record.repository, one.rank, record.world_size
            info = EntryInfo(*of, step.step, previous, lineages[number], size, bytes.fromhex(digest))
            yield info, StoredEntry(segment.number, segment.attempt, one.rank, start)
