"""Repair makes a lost or damaged root or marker anew from the version records. Plan, explain, execute.

A record names everything of its version with digests, and was written after it. So a whole attempt can be read. Only the root
knew whether it *was* a version: attempts that were complete but not committed, and dropped versions that are not collected yet,
come back as well. What is whole is never replaced. The new root has an epoch and an owner of its own, so a coordinator from
before cannot commit to it before it has taken another one.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..errors import Damaged, NotARepository, NotFound, PreconditionFailed, StoreUnavailable
from ..format import keys
from ..format.marker import Marker
from ..format.root import REPAIRER, Entry, Root, Segment
from ..format.signature import PublicKey, Trust
from ..format.version_record import VersionRecord
from ..limits import MAX_MARKER, MAX_ROOT, MAX_SEGMENTS
from ..object_store import ObjectStore
from ..root import invariants
from ..runtime.clock import SYSTEM, Clock
from .scan import ScannedAttempt, ScannedSegment, scan_attempts, scan_segments

_AGAIN = "run `raystow repair URI` again"


class State(enum.Enum):
    """The state of root or marker."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    MISSING = "missing"


@dataclass(frozen=True)
class Look:
    """The object at ``key`` and what it says. ``why``: what is wrong with it. ``tag``: of its content."""

    key: str
    state: State
    why: str = ""
    tag: str | None = None
    repository: str = ""
    signed_by: tuple[PublicKey, ...] = ()


@dataclass(frozen=True)
class RepairPlan:
    """What was found and what is written: ``new_root`` and ``new_marker``, each None if the present one is whole. ``found``: the
    attempts, oldest id first; those that lack nothing come back as versions. ``segments``: of the step journal."""

    store: ObjectStore
    root: Look
    marker: Look
    repository: str
    found: tuple[ScannedAttempt, ...] = ()
    segments: tuple[ScannedSegment, ...] = ()
    new_root: Root | None = None
    new_marker: bytes | None = None

    @property
    def needed(self) -> bool:
        """Whether anything is written."""
        return self.new_root is not None or self.new_marker is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """What cannot be known any more, and what follows from it."""
        of_root = (
            "pins are lost, and so is which version was verified last, and which ones were rolled back: roll back again",
            "saves that were complete but never committed come back as versions: all that they wrote is there",
            "dropped versions that are not collected yet come back, too, until they are dropped again, and thinned ones in full",
            "saves under way fail; a coordinator that is at work goes on with the next one",
        )
        of_marker = (
            "if the repository required signatures, set RAYSTOW_TRUSTED_KEYS or RAYSTOW_SIGNING_KEY, or the new one does not",
        )
        return (of_root if self.new_root is not None else ()) + (of_marker if self.new_marker is not None else ())

    def explain(self) -> list[str]:
        """A line for the root, the marker and each attempt, and the notes."""
        looks = [f"{look.key}: {look.state.value}{': ' + look.why if look.why else ''}" for look in (self.root, self.marker)]
        attempts = [f"{_name(f)}: {'left out: ' + f.lacks if f.lacks else 'comes back'}" for f in self.found]
        segments = [f"segment {one.number}: {'left out: ' + one.lacks if one.lacks else 'comes back'}" for one in self.segments]
        return [*looks, *attempts, *segments, *self.notes]

    def execute(self) -> tuple[str, ...]:
        """Write root and marker; the keys that were written. Raises ``PreconditionFailed`` if an object has changed since the
        plan was made, and ``StoreError``."""
        written = []
        if self.new_root is not None:
            self._replace(self.root, self.new_root.dump())
            written.append(keys.ROOT)
        if self.new_marker is not None:
            self._replace(self.marker, self.new_marker)
            written.append(keys.MARKER)
        return tuple(written)

    def _replace(self, planned: Look, data: bytes) -> None:
        # Read again: bytes that were only damaged in transit must not be replaced.
        if _look(self.store, planned.key) != planned:
            raise PreconditionFailed("has changed since the plan was made; it is left alone", subject=planned.key, remedy=_AGAIN)
        try:
            self.store.put_if(planned.key, data, planned.tag)
        except (PreconditionFailed, StoreUnavailable) as error:  # the answer may be lost: reading again tells
            try:
                written = self.store.get(planned.key, max_bytes=MAX_ROOT)
            except NotFound:
                raise error from None
            if written != data:
                raise


def plan_repair(store: ObjectStore, clock: Clock = SYSTEM, *, trust: Trust | None = None) -> RepairPlan:
    """Plan a repair. Reads root and marker and, if the root is lost, all records and fragments, but no packs.

    ``trust``: whose signatures the versions that come back must have; by default the marker says. ``Damaged`` if objects belong
    to several repositories or nothing says to which, ``Unsupported`` if a newer raystow has written them, ``NotARepository`` if
    there are none.
    """
    root, marker = _look(store, keys.ROOT), _look(store, keys.MARKER)
    if root.state is State.WHOLE and marker.repository in ("", root.repository):
        return RepairPlan(store, root, marker, root.repository, new_marker=_new_marker(marker, root.repository, clock, trust))
    attempts = scan_attempts(store, trust or Trust(marker.signed_by))
    repository = _the_one_repository(store, (marker, root), attempts)
    found = _one_of_each_id(attempts)
    leased = [version[0] for info in store.list(keys.LEASES) if (version := keys.leased(info.key)) is not None]
    segments = scan_segments(store, repository, trust or Trust(marker.signed_by))
    versions = tuple(f.entry for f in found if f.entry is not None and not f.lacks)
    new_root = Root(
        repository=repository,
        epoch=1 + max((f.record.epoch for f in found if f.record is not None), default=0),
        owner=f"{REPAIRER}{clock.token()}",
        next_id=1 + max([f.id for f in found] + leased, default=0),
        write_id=clock.token(),
        versions=versions,
        segments=_needed_segments(segments, versions),
        next_segment=1 + max((one.number for one in segments), default=0),
    )
    invariants.check(None, new_root)
    Root.load(new_root.dump())  # absurd numbers in keys and records must not make an unreadable root
    return RepairPlan(store, root, marker, repository, found, segments, new_root, _new_marker(marker, repository, clock, trust))


def _needed_segments(found: Sequence[ScannedSegment], versions: Sequence[Entry]) -> tuple[Segment, ...]:
    """The newest whole segments after the newest version."""
    newest = max((entry.step for entry in versions[-1:]), default=-1)
    whole = [one.segment for one in found if one.segment is not None and not one.lacks and one.segment.step > newest]
    return tuple(whole[-MAX_SEGMENTS:])


def _look(store: ObjectStore, key: str) -> Look:
    try:
        tagged = store.get_tagged(key, max_bytes=MAX_ROOT if key == keys.ROOT else MAX_MARKER)
    except NotFound:
        return Look(key, State.MISSING)
    except Damaged as error:
        raise Damaged(error.what, subject=error.subject, remedy=f"move this object away, then {_AGAIN}") from error
    try:
        if key == keys.ROOT:
            return Look(key, State.WHOLE, tag=tagged.tag, repository=Root.load(tagged.data).repository)
        marker = Marker.load(tagged.data)
        return Look(key, State.WHOLE, "", tagged.tag, marker.repository, marker.signed_by)
    except Damaged as error:
        return Look(key, State.DAMAGED, error.what, tagged.tag)


def _new_marker(marker: Look, repository: str, clock: Clock, trust: Trust | None) -> bytes | None:
    if marker.state is State.WHOLE:
        return None
    return Marker(repository, clock.now(), trust.keys if trust is not None else ()).dump()


def _the_one_repository(store: ObjectStore, looks: Sequence[Look], found: Sequence[ScannedAttempt]) -> str:
    """The id of the repository that everything readable belongs to."""
    said: dict[str, list[str]] = defaultdict(list)
    for look in looks:
        if look.repository:
            said[look.repository].append(look.key)
    for f in found:
        if f.record is not None:
            said[f.record.repository].append(f.record.key())
    if len(said) == 1:
        return next(iter(said))
    if said:
        who = "; ".join(f"{id!r:.60} by {by[0]}{f' and {len(by) - 1} more' if by[1:] else ''}" for id, by in said.items())
        remedy = f"move away what does not belong here, then {_AGAIN}"
        raise Damaged(f"objects of {len(said)} repositories lie here: {who}", subject=store.uri, remedy=remedy)
    if not found and all(look.state is State.MISSING for look in looks):
        raise NotARepository("there is no repository here", subject=store.uri, remedy="check the path")
    what = "neither root nor marker nor any version record can be read: nothing tells what to bring back"
    remedy = f"delete {keys.ROOT}, {keys.MARKER} and all below {keys.VERSIONS}: the next save begins anew"
    raise Damaged(what, subject=store.uri, remedy=remedy)


def _one_of_each_id(
    found: Sequence[ScannedAttempt], rounded: Mapping[int, int | None] = MappingProxyType({})
) -> tuple[ScannedAttempt, ...]:
    """Choose the attempt of each id that comes back: of the highest epoch, since an epoch uses an id again only if none before
    has committed it. Of one epoch there are two where a version was replaced: the one with all that was saved comes back, then
    the one without bases.

    An attempt does not come back if a base does not, or if the base is thinned and it is not, or if the base has other mantissa
    bits than it had. Ids ascend, and bases are lower.

    Args:
        found: The attempts, ids ascending.
        rounded: By id, the mantissa bits of the attempt to prefer, since a delta would not come back otherwise.
    """
    back, judged, preferred = dict[int, VersionRecord](), list[ScannedAttempt](), dict[int, int | None]()
    kinds = defaultdict[int, set[int | None]](set)
    for f in found:
        if f.record is not None and not f.lacks:
            kinds[f.id].add(f.record.bits)

    def gone(record: VersionRecord) -> list[int]:
        part = record.thinned is not None  # a thinned version needs the weights of its base only
        bases = [(base, back.get(base)) for base in record.bases]
        return [id for id, b in bases if b is None or (b.thinned is not None and not part) or b.bits != record.base_bits]

    for id, group in itertools.groupby(found, lambda f: f.id):
        same = list(group)
        whole = [f.record for f in same if f.record is not None and not f.lacks]

        def rank(r: VersionRecord) -> tuple[object, ...]:
            fits = r.bits == rounded.get(r.id)
            all_of_it = r.thinned is None, r.bits or math.inf
            return r.epoch, not gone(r), fits, all_of_it, not r.bases, r.created, r.attempt

        best = max(whole, key=rank, default=None)
        for f in same:
            if best is not None and not f.lacks and f.attempt != best.attempt:
                f = replace(f, lacks=f"the id belongs to attempt {best.attempt} of epoch {best.epoch}")
            elif best is not None and not f.lacks and (bases := gone(best)):
                as_it_was = " as it was" if bases[0] in back else ""
                f = replace(f, lacks=f"it is a delta to version {bases[0]}, which does not come back{as_it_was}")
            judged.append(f)
        if best is not None and not gone(best):
            back[id] = best
        elif best is not None:
            preferred |= {base: best.base_bits for base in gone(best) if best.base_bits in kinds[base]}
    again = {id: kind for id, kind in preferred.items() if id not in rounded}
    return _one_of_each_id(found, {**rounded, **again}) if again else tuple(judged)


def _name(found: ScannedAttempt) -> str:
    step = f", step {found.record.step}, epoch {found.record.epoch}" if found.record is not None else ""
    return f"version {found.id} (attempt {found.attempt}{step})"
