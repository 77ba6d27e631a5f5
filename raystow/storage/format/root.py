"""The root: one small object that lists the live versions. Replacing it by compare-and-swap is the commit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from ..errors import Damaged
from ..limits import MAX_CHAIN
from . import keys, records
from .json_text import shown

REPAIR = "`raystow repair URI` makes it anew from the version records"
REPAIRER = "repair-"
"""What the owner of a root begins with that a repair has made."""
"""The remedy for a lost root or marker."""


@dataclass(frozen=True)
class Entry:
    """A listed version. ``digest`` and ``size``: BLAKE3 (hexadecimal) and bytes of its record.

    ``step``, ``created`` (seconds since 1970), ``raw`` and ``stored`` (bytes) are copies from the record, so that a listing is
    one read. ``bases``: ids of the versions that it needs. ``groups``: those that a thinned version keeps; empty for a complete
    one. ``saved``: the attempt that it was when it was saved, if it was replaced since.
    """

    id: int
    attempt: str
    digest: str
    size: int
    step: int
    created: float
    raw: int
    stored: int
    bases: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    saved: str = ""

    @property
    def origin(self) -> str:
        """The attempt that was saved: with the id, a name that never changes."""
        return self.saved or self.attempt

    @property
    def resumable(self) -> bool:
        """Whether it has all that was saved."""
        return not self.groups


@dataclass(frozen=True)
class RolledBack:
    """A version that a rollback took out of ``versions``. ``after``: the id of the version before it in its history, 0 for none.
    ``at``: when, in seconds since 1970."""

    entry: Entry
    after: int
    at: float


@dataclass(frozen=True)
class Dropped:
    """An attempt that was dropped or replaced and whose objects may still be there. ``at``: when, by the store's clock."""

    id: int
    attempt: str
    at: float


@dataclass(frozen=True)
class Rewrite:
    """An attempt that may take the place of a live version. ``at``: since when, by the store's clock."""

    id: int
    attempt: str
    at: float


@dataclass(frozen=True)
class Segment:
    """Durable entries of the step journal after the newest version.

    Attributes:
        number: Ascends in the repository; with ``attempt``, where the objects are.
        digest: BLAKE3 (hexadecimal) of the record, ``size`` its bytes.
        step: The last step that it records, ``generation`` the token of the generation that recorded it.
        created: Seconds since 1970.
        stored: Bytes of all entries.
    """

    number: int
    attempt: str
    digest: str
    size: int
    step: int
    generation: str
    created: float
    stored: int


@dataclass(frozen=True)
class Root:
    """The root. ``epoch``: the fencing token of the coordinator in charge, ``owner``: its name. ``next_id``: above every id ever
    committed. ``versions``: the live ones. ``verified``: the newest live version that was found whole, or 0. ``rewrites``:
    attempts that may replace live versions. ``rollbacks``: how many there were. ``rolled_back``: versions that are listed but not
    live. ``segments``: of the step journal, oldest first; ``next_segment``: above all their numbers. ``exports``: address of an
    export -> id of its version, which may have been dropped; ``failed_exports``: address -> the error, for the newest ones
    that failed; both for people. ``open_exports``: address -> id of its version, for those that were begun and may have left a
    part."""

    repository: str
    epoch: int = 0
    owner: str = ""
    next_id: int = 1
    write_id: str = ""
    pins: dict[str, int] = field(default_factory=dict)
    versions: tuple[Entry, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    verified: int = 0
    rewrites: tuple[Rewrite, ...] = ()
    rollbacks: int = 0
    rolled_back: tuple[RolledBack, ...] = ()
    segments: tuple[Segment, ...] = ()
    next_segment: int = 1
    exports: dict[str, int] = field(default_factory=dict)
    failed_exports: dict[str, str] = field(default_factory=dict)
    open_exports: dict[str, int] = field(default_factory=dict)

    @property
    def listed(self) -> tuple[Entry, ...]:
        """The live and the rolled-back versions, ids ascending."""
        rolled_back = (one.entry for one in self.rolled_back)
        return tuple(sorted((*self.versions, *rolled_back), key=lambda entry: entry.id)) if self.rolled_back else self.versions

    def is_older(self, than: Root) -> bool:
        """Whether later swaps have made ``than`` from this root. False if no number differs that swaps only raise."""
        return self._ascending < than._ascending

    @property
    def _ascending(self) -> tuple[int, int, int, int]:
        return self.epoch, self.next_id, self.next_segment, self.rollbacks

    def with_version(self, entry: Entry) -> Root:
        """The root with one more version. Segments up to its step are not needed any more."""
        return replace(
            self,
            next_id=max(self.next_id, entry.id + 1),
            versions=(*self.versions, entry),
            segments=tuple(segment for segment in self.segments if segment.step > entry.step),
        )

    def stamped(self, write_id: str) -> Root:
        """The same root with another write id."""
        return replace(self, write_id=write_id)

    def dump(self) -> bytes:
        """The bytes of ``root.json``."""
        parts = {
            "versions": [_dumped(entry) for entry in self.versions],
            "rolled_back": [{**_dumped(one.entry), "after": one.after, "at": one.at} for one in self.rolled_back],
            "dropped": [vars(d) for d in self.dropped],
            "rewrites": [vars(r) for r in self.rewrites],
            "segments": [vars(segment) for segment in self.segments],
        }
        fields = {**vars(self), **parts}
        if self.next_segment == 1:  # there has never been one
            del fields["segments"], fields["next_segment"]
        for name in ("exports", "failed_exports", "open_exports"):
            if not fields[name]:
                del fields[name]
        return records.dump(fields, keys.ROOT)

    @staticmethod
    def load(data: bytes) -> Root:
        """Parse and check ``root.json``."""
        fields = records.load(data, keys.ROOT)
        versions = tuple(_entry(entry) for entry in records.objects(fields, "versions", keys.ROOT))
        rolled_back = tuple(
            records.parse(RolledBack, one, keys.ROOT, entry=_entry(one))
            for one in records.objects(fields, "rolled_back", keys.ROOT, optional=True)
        )
        for entries in (versions, [one.entry for one in rolled_back]):
            if any(a.id >= b.id for a, b in itertools.pairwise(entries)):
                raise Damaged("version ids are not ascending", subject=keys.ROOT)
        if any(one.after >= one.entry.id for one in rolled_back):
            raise Damaged("a rolled-back version follows a newer one", subject=keys.ROOT)
        notes = {"dropped": Dropped, "rewrites": Rewrite, "segments": Segment}
        parsed = {
            name: tuple(records.parse(kind, note, keys.ROOT) for note in records.objects(fields, name, keys.ROOT, optional=True))
            for name, kind in notes.items()
        }
        numbers = [one.number for one in parsed["segments"] if isinstance(one, Segment)]
        if any(a >= b for a, b in itertools.pairwise([0, *numbers])):
            raise Damaged("the numbers of segments are not ascending", subject=keys.ROOT)
        optional = ("verified", "rollbacks", "next_segment", "exports", "failed_exports", "open_exports")
        root = records.parse(Root, fields, keys.ROOT, optional=optional, versions=versions, rolled_back=rolled_back, **parsed)
        attempts: tuple[Entry | Dropped | Rewrite, ...] = (*root.listed, *root.dropped, *root.rewrites)
        for one in attempts:
            _check_place("version", one.id, one.attempt, root.next_id)
        _check_bases(root)
        for segment in root.segments:
            _check_place("segment", segment.number, segment.attempt, root.next_segment)
        return root


def _check_place(what: str, number: int, attempt: str, following: int) -> None:
    """Raise unless the objects of an attempt can have keys, and its number was spent: else none of them could be deleted."""
    if not keys.is_place(number, attempt, below=following):
        named = f"{what} {number} with attempt {shown(attempt)}"
        raise Damaged(f"there is no {named}: the next number is {following}", subject=keys.ROOT)


def _check_bases(root: Root) -> None:
    """Raise if a version is read through more others than the limit, or through itself: work on chains has no other bound."""
    depths: dict[int, int] = {}
    for entry in root.listed:
        depths[entry.id] = 1 + max((depths.get(base, 0) for base in entry.bases), default=0)
        if max(entry.bases, default=0) >= entry.id or depths[entry.id] > MAX_CHAIN:
            what = f"version {entry.id} is a delta to a later version, or is read through more than {MAX_CHAIN}"
            raise Damaged(what, subject=keys.ROOT)


def _dumped(entry: Entry) -> dict[str, object]:
    return {name: value for name, value in vars(entry).items() if value not in ((), "")}


def _entry(fields: records.Json) -> Entry:
    return records.parse(Entry, fields, keys.ROOT, optional=("bases", "groups", "saved"))
