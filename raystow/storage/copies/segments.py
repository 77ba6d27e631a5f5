"""Copies segments of the step journal to a replica, each by one swap of its root. They follow the newest version of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..coding.digest import stored_digest
from ..commit.catalog import Catalog
from ..commit.segments import read_record, verify_segment
from ..errors import Damaged, NotFound
from ..format import keys
from ..format.root import Root, Segment
from ..format.segment_record import RankEntries, SegmentRecord
from ..format.signature import SEGMENT, Signer
from ..object_store import ObjectStore
from ..root.invariants import Claims
from .transfer import copy_signature


def copy_segment(
    source: Catalog,
    replica: Catalog,
    segment: Segment,
    claims: Claims,
    *,
    signer: Signer | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> bool:
    """Copy a segment that the source's root names, and add it to the replica's root. Takes memory for the entries of one rank.

    Args:
        source: Where the segment is.
        replica: Has the version that the segment follows as its newest.
        segment: As the source's root names it.
        claims: For the swap of the replica's root.
        signer: Signs the copy; None keeps the signature, if there is one.
        progress: Called with the bytes of each object that is at the replica.

    Returns:
        Whether it was copied. False if the source does not need it any more.

    Raises:
        Damaged: An object of the source is not what was written.
        StoreError: A store failed.
    """
    try:
        record = read_record(source.store, source.id, segment, source.trust)
        for one in record.ranks:
            _copy_entries(source.store, replica.store, record, one)
            progress(one.size)
        data = source.store.get(record.key(), max_bytes=segment.size)
        place, digest = (segment.number, segment.attempt), bytes.fromhex(segment.digest)
        renewed = signer.sign(source.id, *place, digest, SEGMENT) if signer is not None else None
        copy_signature(source.store, replica.store, keys.segment_signature(*place), renewed)
        replica.store.put(record.key(), [data])
    except (Damaged, NotFound):
        if segment not in source.root().segments:
            return False
        raise
    read_record(replica.store, replica.id, segment, replica.trust)  # as readers there see it
    verify_segment(replica.store, record, deep=False)

    def add(root: Root) -> Root:
        if segment in root.segments:
            return root  # done before; the answer was lost
        return replace(root, segments=(*root.segments, segment), next_segment=segment.number + 1)

    replica.register.update(add, claims)
    return True


def _copy_entries(source: ObjectStore, replica: ObjectStore, record: SegmentRecord, one: RankEntries) -> None:
    key = keys.segment_entries(record.number, record.attempt, one.rank)
    try:
        data = memoryview(source.get_range(key, 0, one.size))
    except NotFound:
        raise Damaged("the entries are missing", subject=key) from None
    for (start, size), digest in zip(one.places(), one.digests, strict=True):
        if stored_digest(data[start : start + size]).hex() != digest:
            raise Damaged(f"the entry at byte {start} does not have its digest", subject=key)
    replica.put(key, [data])
