"""Collection deletes what belongs to no version. Plan, explain, execute.

What is deleted, and why it is safe:

- Dropped versions: nobody finds them in the root. Earlier readers have the grace period, or a lease.
- Attempts whose id the root has passed (``id < next_id``): no commit of such an id can succeed.
- Attempts that the root notes as rewrites, if they were idle for the grace period: the note is removed first, by a swap.
- Attempts whose id the root has not passed, if neither they nor others like them were written to for the grace period: their ids
  are *spent* first, by a swap that raises ``next_id``.
- Ended leases, old probes, and unfinished writes.

Ages and leases are judged by the store's clock alone. A collection that dies is run again: objects go before the note that the
version was dropped, and a version's record goes first, so that no incomplete version looks whole.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .. import leases, probe, scan
from ..arguments import refused
from ..catalog import Catalog
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


@dataclass(frozen=True)
class Garbage:
    """The objects of one attempt that is no version. ``since``: seconds that it was left alone, by the store's clock. ``kept``:
    why it stays; empty if it is deleted."""

    id: int
    attempt: str
    kind: GarbageKind
    objects: int
    nbytes: int
    since: float
    kept: str = ""


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
    """

    catalog: Catalog
    garbage: tuple[Garbage, ...]
    scraps: tuple[str, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()

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
        due = self._spend()
        held = self.catalog.leased() if due else set()
        due = [g for g in due if (g.id, g.attempt) not in held]
        objects = nbytes = 0
        for g in due:
            for batch in _batches(self.catalog.store, g):
                self.catalog.store.delete([info.key for info in batch])
                objects, nbytes = objects + len(batch), nbytes + sum(info.size for info in batch)
                progress(len(batch))
        self.catalog.store.delete(self.scraps)
        self.catalog.store.abort(self.unfinished)
        self._forget({(g.id, g.attempt) for g in due})
        return Collected(len(due), objects, nbytes, len(self.scraps) + len(self.unfinished))

    def _spend(self) -> list[Garbage]:
        """Make sure that no attempt that is due can become a version; those of which that is true."""
        due = self.due
        if not due:
            return []
        past, gone = 1 + max(g.id for g in due), {(g.id, g.attempt) for g in due}

        def spend(root: Root) -> Root:
            rewrites = tuple(r for r in root.rewrites if (r.id, r.attempt) not in gone)
            spent = root.next_id >= past and len(rewrites) == len(root.rewrites)
            return root if spent else replace(root, next_id=max(root.next_id, past), rewrites=rewrites)

        root = self.catalog.register.update(spend)
        listed = {(entry.id, entry.attempt) for entry in root.listed}
        return [g for g in due if (g.id, g.attempt) not in listed]  # one may have been committed since the plan was made

    def _forget(self, gone: set[tuple[int, str]]) -> None:
        def change(root: Root) -> Root:
            rest = tuple(d for d in root.dropped if (d.id, d.attempt) not in gone)
            return root if len(rest) == len(root.dropped) else replace(root, dropped=rest)

        if any(g.kind is GarbageKind.DROPPED for g in self.due):
            self.catalog.register.update(change)


def plan(catalog: Catalog, *, grace: float = GRACE, dropped_only: bool = False) -> CollectionPlan:
    """See ``Repository.plan_collection``."""
    if not 0 <= grace < math.inf:
        raise refused("grace", grace, "seconds, 0 or more")
    return _plan_dropped(catalog, grace) if dropped_only else _plan_all(catalog, grace)


def _plan_all(catalog: Catalog, grace: float) -> CollectionPlan:
    """Look through the whole repository, with one listing of all objects."""
    store, now = catalog.store, catalog.now()
    # The root is read after the listing, so what is committed meanwhile is not taken for garbage.
    found = {attempt: list(infos) for attempt, infos in scan.attempts(store)}
    root = catalog.root()
    listed = {(entry.id, entry.attempt) for entry in root.listed}
    # An attempt may be noted and have no objects: the last collection died before its end.
    noted = {(d.id, d.attempt) for d in root.dropped} | {(r.id, r.attempt) for r in root.rewrites}
    garbage = [_judged(root, now, *attempt, found.get(attempt, [])) for attempt in sorted((noted | found.keys()) - listed)]
    scraps = leases.ended(store, now) + [info.key for info in store.list(probe.PREFIX) if now - info.modified >= grace]
    unfinished = tuple(write for write in store.unfinished() if now - write.started >= grace)
    return CollectionPlan(catalog, tuple(_kept(garbage, leases.held(store, now), grace)), tuple(scraps), unfinished)


def _plan_dropped(catalog: Catalog, grace: float) -> CollectionPlan:
    """Look at dropped versions only: fast enough for after each commit."""
    root, store = catalog.root(), catalog.store
    if not root.dropped:
        return CollectionPlan(catalog, ())
    now = catalog.now()
    garbage = []
    for d in root.dropped:
        infos = list(store.list(keys.prefix(d.id, d.attempt))) if now - d.at >= grace else []
        garbage.append(_judged(root, now, d.id, d.attempt, infos))
    return CollectionPlan(catalog, tuple(_kept(garbage, leases.held(store, now), grace)))


def _judged(root: Root, now: float, id: int, attempt: str, infos: Sequence[ObjectInfo]) -> Garbage:
    dropped = {(d.id, d.attempt): d.at for d in root.dropped}
    rewrites = {(r.id, r.attempt): r.at for r in root.rewrites}
    since = max((info.modified for info in infos), default=rewrites.get((id, attempt), now))
    if (id, attempt) in dropped:
        kind, since = GarbageKind.DROPPED, dropped[id, attempt]
    elif (id, attempt) in rewrites:
        kind = GarbageKind.REWRITE
    else:
        kind = GarbageKind.OPEN if id >= root.next_id else GarbageKind.FAILED
    return Garbage(id, attempt, kind, len(infos), sum(info.size for info in infos), now - since)


def _kept(garbage: list[Garbage], held: set[tuple[int, str]], grace: float) -> Iterator[Garbage]:
    """The same, with the reason of each that stays."""
    busy = any(g.kind is GarbageKind.OPEN and g.since < grace for g in garbage)
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
    """The objects as they are now, the record first and alone."""
    record = keys.record(garbage.id, garbage.attempt)
    infos = list(store.list(keys.prefix(garbage.id, garbage.attempt)))
    if first := [info for info in infos if info.key == record]:
        yield first
    rest = [info for info in infos if info.key != record]
    for start in range(0, len(rest), _BATCH):
        yield rest[start : start + _BATCH]


def _name(garbage: Garbage) -> str:
    what = f"attempt {garbage.attempt} at version {garbage.id}"
    if garbage.kind is GarbageKind.DROPPED:
        what = f"version {garbage.id}"
    return f"{what} ({garbage.kind.value}, {garbage.objects} objects, {garbage.nbytes} bytes)"
