"""Collection deletes what belongs to no version. Plan, explain, execute.

What is deleted, and why it is safe:

- Dropped versions: nobody finds them in the root. Earlier readers have the grace period, or a lease.
- Attempts whose id the root has passed (``id < next_id``): no commit of such an id can succeed.
- Attempts that the root notes as rewrites, if they were idle for the grace period: the note is removed first, by a swap.
- Attempts whose id the root has not passed, if neither they nor others like them are leased or were written to for the grace
  period: their ids are *spent* first, by a swap that raises ``next_id``.
- Segments of the step journal that the root does not name, if they were idle for the grace period: their numbers are spent first.
- Ended leases, old probes, and unfinished writes.

Ages and leases are judged by the store's clock alone. A collection that dies is run again: objects go before the note that the
version was dropped, and a version's record goes first, so that no incomplete version looks whole.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..arguments import refused
from ..checks import scan
from ..commit import leases, segments
from ..commit.catalog import Catalog
from ..format import keys
from ..format.root import Root
from ..object_store import ObjectInfo, ObjectStore, Unfinished

GRACE = 3600.0
"""Seconds that dropped versions and idle attempts are left alone by default."""
_BATCH = 1000

Progress = Callable[[int], None]


class GarbageKind(enum.Enum):
    """What became of the attempt."""

    DROPPED = "dropped"
    FAILED = "never committed"
    REWRITE = "being rewritten"
    OPEN = "may be in flight"
    SEGMENT = "segment of the journal"


_PASSED = GarbageKind.DROPPED, GarbageKind.FAILED


@dataclass(frozen=True)
class Garbage:
    """The objects of one attempt that is no version, or of a segment, whose number is ``id``. ``since``: seconds that it was left
    alone, by the store's clock. ``kept``: why it stays; empty if it is deleted."""

    id: int
    attempt: str
    kind: GarbageKind
    objects: int
    nbytes: int
    since: float
    kept: str = ""

    @property
    def prefix(self) -> str:
        """What the keys of its objects begin with."""
        return (keys.segment if self.kind is GarbageKind.SEGMENT else keys.prefix)(self.id, self.attempt)

    @property
    def record(self) -> str:
        """The key of its record."""
        return (keys.segment_record if self.kind is GarbageKind.SEGMENT else keys.record)(self.id, self.attempt)


@dataclass(frozen=True)
class Objects:
    """The number of an attempt's objects, their bytes, and when the newest was written."""

    count: int = 0
    nbytes: int = 0
    modified: float = -math.inf

    @staticmethod
    def of(infos: Iterable[ObjectInfo], progress: Progress) -> Objects:
        """Count objects, of which there may be hundreds of thousands. ``progress``: see ``CollectionPlan.execute``."""
        count, nbytes, modified = 0, 0, -math.inf
        for info in infos:
            count, nbytes, modified = count + 1, nbytes + info.size, max(modified, info.modified)
            if count % _BATCH == 0:
                progress(_BATCH)
        progress(count % _BATCH)
        return Objects(count, nbytes, modified)


@dataclass(frozen=True)
class Collected:
    """What a collection has deleted: attempts, their objects and bytes, and how many scraps."""

    attempts: int
    objects: int
    nbytes: int
    scraps: int


@dataclass(frozen=True)
class CollectionPlan:
    """A plan to delete objects that belong to no version.

    Attributes:
        garbage: The attempts and dropped versions, oldest id first, each with the reason if it is kept.
        scraps: Keys of ended leases and old probes.
        unfinished: Writes that were never completed.
        grace: Seconds that were asked for.
        dropped_only: Whether only dropped versions and segments were looked at.
    """

    catalog: Catalog
    garbage: tuple[Garbage, ...]
    scraps: tuple[str, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    grace: float = GRACE
    dropped_only: bool = False

    @property
    def due(self) -> tuple[Garbage, ...]:
        """What goes."""
        return tuple(g for g in self.garbage if not g.kept)

    def explain(self) -> list[str]:
        """Explain the plan.

        Returns:
            A line for each attempt, and one for leases and probes.
        """
        lines = [f"{_name(g)}: {'kept: ' + g.kept if g.kept else 'deleted'}" for g in self.garbage]
        if self.scraps or self.unfinished:
            lines.append(f"{len(self.scraps)} ended leases and probes, {len(self.unfinished)} unfinished writes: deleted")
        return lines

    def execute(self, progress: Progress = lambda objects: None) -> Collected:
        """Delete the objects.

        Args:
            progress: Called with the number of objects of each batch.

        Returns:
            The numbers of attempts, objects and bytes that were deleted.

        Raises:
            StoreError: The store fails. Run it again to delete the rest.
        """
        store, gone = self.catalog.store, set[tuple[int, str]]()
        store.delete(self.scraps)
        store.abort(self.unfinished)
        objects = nbytes = 0
        for in_need_of_a_swap in (False, True):  # in this order, since a full store may refuse the swap
            due = [g for g in self.due if (g.kind not in _PASSED) == in_need_of_a_swap]
            due = self._spend(self._still_due(due) if in_need_of_a_swap else due)
            held = self.catalog.leased() if due else set()
            due = [g for g in due if (g.id, g.attempt) not in held]
            for g in due:
                for batch in _batches(store, g):
                    store.delete([info.key for info in batch])
                    objects, nbytes = objects + len(batch), nbytes + sum(info.size for info in batch)
                    progress(len(batch))
            gone |= {(g.id, g.attempt) for g in due}
        self._forget(gone)
        return Collected(len(gone), objects, nbytes, len(self.scraps) + len(self.unfinished))

    def _still_due(self, due: list[Garbage]) -> list[Garbage]:
        """Those that are due now, too: the plan may be old, and what was begun since keeps its id."""
        now = plan(self.catalog, grace=self.grace, dropped_only=self.dropped_only).due if due else ()
        still = {(g.id, g.attempt) for g in now}
        return [g for g in due if (g.id, g.attempt) in still]

    def _spend(self, due: list[Garbage]) -> list[Garbage]:
        """Make sure that nothing that is due can be committed; that of which it is true."""
        if not due:
            return []
        past = 1 + max((g.id for g in due if g.kind is not GarbageKind.SEGMENT), default=0)
        past_segment = 1 + max((g.id for g in due if g.kind is GarbageKind.SEGMENT), default=0)
        gone = {(g.id, g.attempt) for g in due}

        def spend(root: Root) -> Root:
            spent = replace(
                root,
                next_id=max(root.next_id, past),
                next_segment=max(root.next_segment, past_segment),
                rewrites=tuple(r for r in root.rewrites if (r.id, r.attempt) not in gone),
            )
            return root if spent == root else spent

        root = self.catalog.register.update(spend)
        listed = {entry.attempt for entry in root.listed} | {segment.attempt for segment in root.segments}
        return [g for g in due if g.attempt not in listed]  # one may have been committed since the plan was made

    def _forget(self, gone: set[tuple[int, str]]) -> None:
        def change(root: Root) -> Root:
            rest = tuple(d for d in root.dropped if (d.id, d.attempt) not in gone)
            return root if len(rest) == len(root.dropped) else replace(root, dropped=rest)

        # What was open when the plan was made may have been committed and dropped since.
        if any(g.kind in (GarbageKind.DROPPED, GarbageKind.OPEN, GarbageKind.REWRITE) for g in self.due):
            self.catalog.register.update(change)


def plan(
    catalog: Catalog, *, grace: float = GRACE, dropped_only: bool = False, progress: Progress = lambda objects: None
) -> CollectionPlan:
    """See ``Repository.plan_collection``."""
    if type(grace) not in (int, float) or not 0 <= grace < math.inf:
        raise refused("grace", grace, "seconds, 0 or more")
    made = (_plan_dropped if dropped_only else _plan_all)(catalog, grace, progress)
    return replace(made, grace=grace, dropped_only=dropped_only)


def _plan_all(catalog: Catalog, grace: float, progress: Progress) -> CollectionPlan:
    """Look through the whole repository, with one listing of all objects."""
    store, now = catalog.store, catalog.now()
    # The root is read after the listing, so what is committed meanwhile is not taken for garbage.
    found = {attempt: Objects.of(infos, progress) for attempt, infos in scan.attempts(store)}
    root = catalog.root()
    listed = {(entry.id, entry.attempt) for entry in root.listed}
    # An attempt may be noted and have no objects: the last collection died before its end.
    noted = {(d.id, d.attempt) for d in root.dropped} | {(r.id, r.attempt) for r in root.rewrites}
    unlisted = ((attempt, found.get(attempt, Objects())) for attempt in sorted((noted | found.keys()) - listed))
    garbage = [*_judged(root, now, unlisted), *_segments(store, root, now)]
    trials = (info for info in store.list(keys.PROBE) if keys.is_trial(info.key))
    scraps = leases.ended(store, now) + [info.key for info in trials if now - info.modified >= grace]
    ours = (write for write in store.unfinished() if keys.in_layout(write.key))
    unfinished = tuple(write for write in ours if now - write.started >= grace)
    return CollectionPlan(catalog, tuple(_kept(garbage, leases.held(store, now), grace)), tuple(scraps), unfinished)


def _plan_dropped(catalog: Catalog, grace: float, progress: Progress) -> CollectionPlan:
    """Look at dropped versions and segments only: fast enough for after each commit."""
    root, store = catalog.root(), catalog.store
    if not root.dropped and root.next_segment == 1:
        return CollectionPlan(catalog, ())
    now = catalog.now()
    found = (
        ((d.id, d.attempt), Objects.of(store.list(keys.prefix(d.id, d.attempt)) if now - d.at >= grace else (), progress))
        for d in root.dropped
    )
    garbage = [*_segments(store, root, now), *_judged(root, now, found)]
    return CollectionPlan(catalog, tuple(_kept(garbage, leases.held(store, now), grace)))


def _segments(store: ObjectStore, root: Root, now: float) -> list[Garbage]:
    """The segments that the root does not name. One that was committed since it was read is found by ``_spend``."""
    named = {(one.number, one.attempt) for one in root.segments}
    return [
        Garbage(
            *(*place, GarbageKind.SEGMENT, len(infos), sum(info.size for info in infos)),
            since=now - max(info.modified for info in infos),
        )
        for place, infos in segments.stored_segments(store)
        if place not in named
    ]


def _judged(root: Root, now: float, attempts: Iterable[tuple[tuple[int, str], Objects]]) -> Iterator[Garbage]:
    """The attempts, each given with its objects, as garbage."""
    dropped = {(d.id, d.attempt): d.at for d in root.dropped}
    rewrites = {(r.id, r.attempt): r.at for r in root.rewrites}
    for (id, attempt), objects in attempts:
        since = objects.modified if objects.count else rewrites.get((id, attempt), now)
        if (id, attempt) in dropped:
            kind, since = GarbageKind.DROPPED, dropped[id, attempt]
        elif (id, attempt) in rewrites:
            kind = GarbageKind.REWRITE
        else:
            kind = GarbageKind.OPEN if id >= root.next_id else GarbageKind.FAILED
        yield Garbage(id, attempt, kind, objects.count, objects.nbytes, now - since)


def _kept(garbage: list[Garbage], held: set[tuple[int, str]], grace: float) -> Iterator[Garbage]:
    """The same, with the reason of each that stays."""
    busy = any(g.kind is GarbageKind.OPEN and (g.since < grace or (g.id, g.attempt) in held) for g in garbage)
    for g in garbage:
        if (g.id, g.attempt) in held:
            yield replace(g, kept="it is being read under a lease")
        elif g.since < grace:
            yield replace(g, kept=f"the grace period ends in {grace - g.since:.0f} s")
        elif g.kind is GarbageKind.OPEN and busy:
            yield replace(g, kept="a save may be in flight: its id is not passed yet")
        else:
            yield g


def _batches(store: ObjectStore, garbage: Garbage) -> Iterator[list[ObjectInfo]]:
    """The objects as they are now, the record first and alone. Of hundreds of thousands, one batch is in memory at a time."""
    if first := [info for info in store.list(garbage.record) if info.key == garbage.record]:
        yield first
    rest = (info for info in store.list(garbage.prefix) if keys.in_layout(info.key) and info.key != garbage.record)
    while batch := list(itertools.islice(rest, _BATCH)):
        yield batch


def _name(garbage: Garbage) -> str:
    what = f"attempt {garbage.attempt} at version {garbage.id}"
    if garbage.kind is GarbageKind.DROPPED:
        what = f"version {garbage.id}"
    elif garbage.kind is GarbageKind.SEGMENT:
        what = f"attempt {garbage.attempt} at segment {garbage.id}"
    return f"{what} ({garbage.kind.value}, {garbage.objects} objects, {garbage.nbytes} bytes)"
