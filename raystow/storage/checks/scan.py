"""Scans a store for attempts and whether each is whole, for when there is no root.

An attempt is whole if its record matches its own digest, and fragments and packs are there as the record says. Reads no pack.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..coding.digest import stored_digest
from ..commit import segments
from ..errors import Damaged, NotFound, Untrusted
from ..format import keys
from ..format.pack_sizes import PackSizes, listed, pack_sizes
from ..format.root import Entry, Segment
from ..format.segment_record import SegmentRecord
from ..format.signature import SEGMENT, Trust
from ..format.version_record import VersionRecord
from ..limits import MAX_FRAGMENT, MAX_RECORD, MAX_SEGMENT
from ..object_store import ObjectInfo, ObjectStore

_AT_ONCE = 16  # attempts that are looked at in parallel: each holds one fragment in memory


@dataclass(frozen=True)
class ScannedSegment:
    """A segment of the step journal. ``lacks``: why it cannot be used; empty if it can."""

    number: int
    attempt: str
    segment: Segment | None = None
    lacks: str = ""


@dataclass(frozen=True)
class ScannedAttempt:
    """An attempt. ``record`` and ``entry`` are None if its record cannot be read. ``lacks``: what is missing for a version; empty
    if nothing is."""

    id: int
    attempt: str
    record: VersionRecord | None = None
    entry: Entry | None = None
    lacks: str = ""


def scan_attempts(store: ObjectStore, trust: Trust) -> list[ScannedAttempt]:
    """Every attempt that has objects in the store, in the order of ids. ``trust``: who must have signed the records.
    ``Unsupported`` if a record was written by a newer raystow."""
    found: list[ScannedAttempt] = []
    sizes = ((*attempt, {info.key: info.size for info in infos}) for attempt, infos in attempts(store))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while batch := list(itertools.islice(sizes, _AT_ONCE)):
            found += pool.map(lambda of: _examined(store, trust, *of), batch)
    return sorted(found, key=lambda f: (f.id, f.attempt))


def scan_segments(store: ObjectStore, repository: str, trust: Trust) -> tuple[ScannedSegment, ...]:
    """Every segment of the step journal in the store, in the order of numbers, of which one attempt can be used. Reads no
    entries."""
    found = list[ScannedSegment]()
    for (number, attempt), infos in segments.stored_segments(store):
        key = keys.segment_record(number, attempt)
        try:
            data = store.get(key, max_bytes=MAX_SEGMENT)
            record = SegmentRecord.load(data, key)
            if (record.repository, record.key()) != (repository, key):
                raise Damaged("it is that of another segment", subject=key)
            digest = stored_digest(data)
            trust.check(store, repository, number, attempt, digest, SEGMENT)
            segment = record.segment(digest, len(data))
            lacks = next(iter(segments.wrong_sizes(record.objects(), {info.key: info.size for info in infos})), "")
            if not lacks and any(one.number == number and not one.lacks for one in found):
                lacks = "another one has its number"
            found.append(ScannedSegment(number, attempt, segment, lacks))
        except (Damaged, NotFound, Untrusted) as error:
            found.append(ScannedSegment(number, attempt, lacks=f"{_name(error.subject)}: {error.what}"))
    return tuple(sorted(found, key=lambda one: (one.number, one.attempt)))


def attempts(store: ObjectStore) -> Iterator[tuple[tuple[int, str], Iterator[ObjectInfo]]]:
    """Id and attempt, and the objects of this attempt. Other objects are not of raystow and are left alone."""
    for attempt, infos in itertools.groupby(store.list(keys.VERSIONS), lambda info: keys.attempt_of(info.key)):
        if attempt is not None:
            yield attempt, infos


def _examined(store: ObjectStore, trust: Trust, id: int, attempt: str, sizes: Mapping[str, int]) -> ScannedAttempt:
    key = keys.record(id, attempt)
    if key not in sizes:
        return ScannedAttempt(id, attempt, lacks="no version record: its save did not end, or it is half deleted")
    try:
        data = store.get(key, max_bytes=MAX_RECORD)
        record = VersionRecord.load(data, key)
        if (record.id, record.attempt) != (id, attempt):
            raise Damaged("it is that of another attempt", subject=key)
    except (Damaged, NotFound) as error:
        return ScannedAttempt(id, attempt, lacks=f"version.json: {error.what}")
    digest = stored_digest(data)
    try:
        trust.check(store, record.repository, id, attempt, digest)
        lacks = _lacks(store, record, sizes)
    except (Damaged, NotFound, Untrusted) as error:
        lacks = f"{_name(error.subject)}: {error.what}"
    return ScannedAttempt(id, attempt, record, record.entry(digest, len(data)), lacks)


def _lacks(store: ObjectStore, record: VersionRecord, sizes: Mapping[str, int]) -> str:
    """What a version with this record lacks, given the sizes of its objects by key."""
    fragments = {keys.fragment(record.id, record.attempt, f.node): f for f in record.fragments}

    def packs(node: int, found: PackSizes) -> dict[str, int]:
        return {keys.pack(record.id, record.attempt, node, *place): size for place, size in found.items()}

    expected = {key: f.size for key, f in fragments.items()}
    for node, found in listed(record.packs or ()).items():
        expected |= packs(node, found)
    wrong = segments.wrong_sizes(expected, sizes)
    for key, f in fragments.items() if not wrong else ():
        data = store.get(key, max_bytes=min(f.size, MAX_FRAGMENT))
        if stored_digest(data).hex() != f.digest:
            wrong.append(f"{_name(key)} does not match its digest")
        elif record.packs is None:
            wrong += segments.wrong_sizes(packs(f.node, pack_sizes(data, key)), sizes)
    more = f", and {len(wrong) - 1} more like it" if wrong[1:] else ""
    return f"{wrong[0]}{more}" if wrong else ""


def _name(key: str) -> str:
    return key.rpartition("/")[2]
