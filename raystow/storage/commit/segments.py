"""Segments of the step journal: entries of optimizer steps that the store has, all of them after the newest version.

A chain of digests covers them as it covers versions: root, record, entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from ..coding.digest import stored_digest
from ..errors import Damaged, NotFound
from ..format import keys
from ..format.root import Segment
from ..format.segment_record import SegmentRecord
from ..format.signature import SEGMENT, Signer, Trust
from ..limits import MAX_SEGMENT
from ..object_store import ObjectInfo, ObjectStore
from .signed_record import put_signed


def put_segment(store: ObjectStore, record: SegmentRecord, signer: Signer | None) -> Segment:
    """Write a segment's record and, with a ``signer``, its signature. Returns its entry for the root.

    Raises ``SaveFailed``, and writes nothing, if readers would refuse the record.
    """
    data, digest = put_signed(store, record, record.number, SEGMENT, signer)
    return record.segment(digest, len(data))


def read_record(store: ObjectStore, repository: str, segment: Segment, trust: Trust) -> SegmentRecord:
    """The record of a segment. Raises ``Damaged`` if it is not the one that the root names, and ``Untrusted``."""
    key = keys.segment_record(segment.number, segment.attempt)
    try:
        data = store.get(key, max_bytes=min(segment.size, MAX_SEGMENT))
    except NotFound:
        raise Damaged("the record is missing", subject=key) from None
    digest = stored_digest(data)
    if len(data) != segment.size or digest.hex() != segment.digest:
        raise Damaged("not the record that the root names", subject=key)
    trust.check(store, repository, segment.number, segment.attempt, digest, SEGMENT)
    record = SegmentRecord.load(data, key)
    if record.repository != repository or record.segment(digest, len(data)) != segment:  # the root is not signed
        raise Damaged("the record is that of another segment", subject=key)
    return record


def verify_segment(
    store: ObjectStore, record: SegmentRecord, progress: Callable[[int], None] = lambda nbytes: None, *, deep: bool
) -> None:
    """Check the sizes of a segment's objects, and with ``deep`` each of its entries. Raises ``Damaged``. Takes memory for the
    largest entry."""
    found = {info.key: info.size for info in store.list(keys.segment(record.number, record.attempt))}
    for wrong in wrong_sizes(record.objects(), found):
        raise Damaged(wrong, subject=record.key())
    for one in record.ranks if deep else ():
        key = keys.segment_entries(record.number, record.attempt, one.rank)
        for (start, size), digest in zip(one.places(), one.digests, strict=True):
            if stored_digest(store.get_range(key, start, size)).hex() != digest:
                raise Damaged(f"the entry at byte {start} does not have its digest", subject=key)
            progress(size)


def wrong_sizes(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """What is wrong with objects whose sizes are given by key: each that is missing or of another size."""
    return [
        f"{key.rpartition('/')[2]} {f'has {found[key]} bytes instead of {size}' if key in found else 'is missing'}"
        for key, size in expected.items()
        if found.get(key) != size
    ]


def stored_segments(store: ObjectStore) -> Iterator[tuple[tuple[int, str], list[ObjectInfo]]]:
    """Number, attempt and objects of each segment in the store, whether the root names it or not."""
    for place, infos in itertools.groupby(store.list(keys.SEGMENTS), lambda info: keys.segment_of(info.key)):
        if place is not None:
            yield place, list(infos)
