"""Collection: frees what belongs to no version. Plan, explain, execute.

What may go, and why it is safe:

- A dropped version. It is out of the root, so nobody finds it any more; those who had found it before have the grace period to
  finish, or a lease for as long as they need.
- An attempt whose id the root has passed (``id < next_id``) without listing it. No commit of that id can succeed any more,
  however late its writer wakes up.
- But one that the root notes as a rewrite may still take the place of a live version. If it was not written to for the grace
  period, the note goes first, by a swap of the root: from then on it is of the kind above.
- An attempt whose id the root has not passed may be in flight. If neither it nor any other like it was written to for the grace
  period, its id is *spent* first, by a swap of the root: from then on it is of the kind above.
- Ended leases, old probes, and what killed writers have left half-written.

Ages and leases are judged by the store's clock alone. A collection that dies is simply run again: objects go before the root
forgets that the version was dropped, and a version's record goes first, so that no half version ever looks whole.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .. import leases, probe, store_clock
from ..clock import Clock
from ..format import keys
from ..format.root import Register, Root
from ..object_store import ObjectInfo, ObjectStore, Unfinished

GRACE = 3600.0
"""Seconds that dropped versions and idle attempts are left alone, unless told otherwise."""
_BATCH = 1000

Progress = Callable[[int], None]


class Kind(enum.Enum):
    """What became of the attempt."""

    DROPPED = "dropped"
    FAILED = "never committed"
    REWRITE = "being rewritten"
    OPEN = "may be in flight"


@dataclass(frozen=True)
class Garbage:
    """What lies in the store for one attempt that is no version. ``since``: seconds that it has been left alone, by the store's
    clock. ``kept``: why it stays this time; empty if it goes."""

    id: int
    attempt: str
    kind: Kind
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
    """What goes and what stays, oldest id first. ``scraps``: keys of ended leases and old probes. ``unfinished``: writes that
    were never completed."""

    store: ObjectStore
    register: Register
    clock: Clock
    garbage: tuple[Garbage, ...]
    scraps: tuple[str, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()

    @property
    def due(self) -> tuple[Garbage, ...]:
        """What goes."""
        return tuple(g for g in self.garbage if not g.kept)

    def explain(self) -> list[str]:
        """A line for each attempt, and one for the scraps."""
        lines = [f"{_name(g)}: {'kept: ' + g.kept if g.kept else 'deleted'}" for g in self.garbage]
        if self.scraps or self.unfinished:
            lines.append(f"{len(self.scraps)} ended leases and probes, {len(self.unfinished)} unfinished writes: deleted")
        return lines

    def execute(self, progress: Progress = lambda objects: None) -> Collected:
        """Delete; ``progress`` is told the number of objects of each batch. Raises ``StoreError``; then run it again."""
        due = self._spend()
        held = leases.held(self.store, store_clock.now(self.store, self.clock)) if due else set()
        due = [g for g in due if (g.id, g.attempt) not in held]
        objects = nbytes = 0
        for g in due:
            for batch in _batches(self.store, g):
                self.store.delete([info.key for info in batch])
                objects, nbytes = objects + len(batch), nbytes + sum(info.size for info in batch)
                progress(len(batch))
        self.store.delete(self.scraps)
        self.store.abort(self.unfinished)
        self._forget({(g.id, g.attempt) for g in due})
        return Collected(len(due), objects, nbytes, len(self.scraps) + len(self.unfinished))

    def _spend(self) -> list[Garbage]:
        """Make sure that none of them can become a version any more; those of which that is true."""
        due = self.due
        if not due:
            return []
        past, gone = 1 + max(g.id for g in due), {(g.id, g.attempt) for g in due}

        def spend(root: Root) -> Root:
            rewrites = tuple(r for r in root.rewrites if (r.id, r.attempt) not in gone)
            spent = root.next_id >= past and len(rewrites) == len(root.rewrites)
            return root if spent else replace(root, next_id=max(root.next_id, past), rewrites=rewrites)

        root = self.register.update(spend)
        live = {(entry.id, entry.attempt) for entry in root.versions}
        return [g for g in due if (g.id, g.attempt) not in live]  # one was committed since the plan was made

    def _forget(self, gone: set[tuple[int, str]]) -> None:
        def change(root: Root) -> Root:
            rest = tuple(d for d in root.dropped if (d.id, d.attempt) not in gone)
            return root if len(rest) == len(root.dropped) else replace(root, dropped=rest)

        if any(g.kind is Kind.DROPPED for g in self.due):
            self.register.update(change)


def plan(store: ObjectStore, register: Register, clock: Clock, *, grace: float = GRACE) -> CollectionPlan:
    """Look through the whole repository. One listing of all its objects."""
    now = store_clock.now(store, clock)
    # The listing comes before the root: what is committed meanwhile is in the root then, and not taken for garbage.
    found = list(_found(store))
    root = register.read()
    live = {(entry.id, entry.attempt) for entry in root.versions}
    garbage = [_judged(root, now, *attempt, infos) for attempt, infos in found if attempt not in live]
    seen = {(g.id, g.attempt) for g in garbage}
    # A dropped version whose objects are gone while the root still remembers it: the last collection died before its end.
    garbage += [Garbage(d.id, d.attempt, Kind.DROPPED, 0, 0, now - d.at) for d in root.dropped if (d.id, d.attempt) not in seen]
    garbage += [Garbage(r.id, r.attempt, Kind.REWRITE, 0, 0, now - r.at) for r in root.rewrites if (r.id, r.attempt) not in seen]
    kept = _kept(garbage, leases.held(store, now), grace)
    scraps = leases.ended(store, now) + [info.key for info in store.list(probe.PREFIX) if now - info.modified >= grace]
    unfinished = tuple(write for write in store.unfinished() if now - write.started >= grace)
    return CollectionPlan(store, register, clock, tuple(sorted(kept, key=lambda g: (g.id, g.attempt))), tuple(scraps), unfinished)


def plan_dropped(store: ObjectStore, register: Register, clock: Clock, *, grace: float = GRACE) -> CollectionPlan:
    """Look at dropped versions only: cheap enough for after each commit."""
    dropped = register.read().dropped
    if not dropped:
        return CollectionPlan(store, register, clock, ())
    now = store_clock.now(store, clock)
    garbage = []
    for d in dropped:
        infos = list(store.list(keys.prefix(d.id, d.attempt))) if now - d.at >= grace else []
        garbage.append(Garbage(d.id, d.attempt, Kind.DROPPED, len(infos), sum(info.size for info in infos), now - d.at))
    return CollectionPlan(store, register, clock, tuple(_kept(garbage, leases.held(store, now), grace)))


def _found(store: ObjectStore) -> Iterator[tuple[tuple[int, str], list[ObjectInfo]]]:
    """Attempts and their objects. Objects that lie elsewhere are not raystow's, and left alone."""
    for attempt, infos in itertools.groupby(store.list(keys.VERSIONS), lambda info: keys.attempt_of(info.key)):
        if attempt is not None:
            yield attempt, list(infos)


def _judged(root: Root, now: float, id: int, attempt: str, infos: list[ObjectInfo]) -> Garbage:
    dropped = next((d.at for d in root.dropped if (d.id, d.attempt) == (id, attempt)), None)
    kind = Kind.DROPPED if dropped is not None else Kind.OPEN if id >= root.next_id else Kind.FAILED
    if any((r.id, r.attempt) == (id, attempt) for r in root.rewrites):
        kind = Kind.REWRITE
    since = now - (max(info.modified for info in infos) if dropped is None else dropped)
    return Garbage(id, attempt, kind, len(infos), sum(info.size for info in infos), since)


def _kept(garbage: list[Garbage], held: set[tuple[int, str]], grace: float) -> Iterator[Garbage]:
    """The same, with the reason of each that stays."""
    busy = any(g.kind is Kind.OPEN and g.since < grace for g in garbage)
    for g in garbage:
        if (g.id, g.attempt) in held:
            yield replace(g, kept="it is being read under a lease")
        elif g.since < grace:
            yield replace(g, kept=f"the grace period ends in {grace - g.since:.0f} s")
        elif g.kind is Kind.OPEN and busy:
            yield replace(g, kept="a save may be in flight: its id is not passed yet")
        else:
            yield g


def _batches(store: ObjectStore, garbage: Garbage) -> Iterator[list[ObjectInfo]]:
    """The objects as they are now, the version's record first and alone."""
    record = keys.record(garbage.id, garbage.attempt)
    infos = list(store.list(keys.prefix(garbage.id, garbage.attempt)))
    if first := [info for info in infos if info.key == record]:
        yield first
    rest = [info for info in infos if info.key != record]
    for start in range(0, len(rest), _BATCH):
        yield rest[start : start + _BATCH]


def _name(garbage: Garbage) -> str:
    what = f"attempt {garbage.attempt} at version {garbage.id}"
    if garbage.kind is Kind.DROPPED:
        what = f"version {garbage.id}"
    return f"{what} ({garbage.kind.value}, {garbage.objects} objects, {garbage.nbytes} bytes)"
