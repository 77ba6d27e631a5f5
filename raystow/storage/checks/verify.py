"""Verification checks a version against the chain of digests that ends in the root: its packs' sizes, or every byte."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import Damaged
from ..format import keys, values
from ..format.boxes import tile
from ..format.manifest import Chunk
from ..versions.version import Version
from .verify_progress import VerifyJournal

MEMORY = 512 << 20
"""Bytes that a deep verification may take in addition to the manifest."""

Packs = Mapping[str, list[Chunk]]
"""Key of a pack -> its chunks in the order of storage."""


@dataclass(frozen=True)
class Verified:
    """The result of a verification that found nothing wrong: counts, and bytes after decoding (``raw``) and in the store.

    ``read``: stored bytes of the packs that were read; none unless it was deep. ``resumed``: those of packs that were not read,
    since they are in the journal.
    """

    version: int
    step: int
    tensors: int
    chunks: int
    packs: int
    raw: int
    stored: int
    read: int
    resumed: int


def verify_sizes(version: Version) -> Verified:
    """Check record and manifest by their digests, packs by their sizes. Reads no pack. Takes memory for the manifest.

    Raises:
        Damaged: Names the first object that is wrong.
    """
    return _counted(version, checked_packs(version))


def verify_bytes(
    version: Version,
    progress: Callable[[int], None] = lambda nbytes: None,
    *,
    journal: VerifyJournal | None = None,
    memory: int = MEMORY,
) -> Verified:
    """Call ``verify_sizes``, then read and decode every pack that is not in the journal, and check both digests of each chunk.

    ``progress`` is called with the decoded bytes of each chunk, first with those of all packs in the journal. A pack that was
    read to its end is added to the journal. Takes memory for the manifest and ``memory`` bytes of chunks, or one larger chunk.
    """
    packs = checked_packs(version)
    record = version.entry.digest
    reader = version.reader()
    every = reader.whole(chunk for rows in version.chunks.values() for chunk in rows)
    done = {run.key for run in every if journal is not None and (record, run.key) in journal}
    progress(sum(piece.chunk.nbytes for run in every if run.key in done for piece in run.pieces))
    runs = [run for run in every if run.key not in done]
    left = Counter(run.key for run in runs)
    for run in reader.check(runs, progress, memory=memory):
        left[run.key] -= 1
        if journal is not None and not left[run.key]:
            journal.add(record, run.key)
    resumed = sum(chunk.stored for key in done for chunk in packs.get(key, ()))
    return replace(_counted(version, packs), read=version.bytes - resumed, resumed=resumed)


def checked_packs(version: Version, seen: set[int] | None = None) -> Packs:
    """As ``verify_sizes``; returns the chunks of each pack. ``seen``: ids of bases that need not be checked again; those that are
    checked are added."""
    packs: dict[str, list[Chunk]] = defaultdict(list)
    for rows in version.chunks.values():
        if not tile([row.box for row in rows], ((0,) * len(rows[0].shape), rows[0].shape)):
            raise Damaged("the manifest's chunks do not hold each element exactly once", subject=rows[0].name)
        for row in (row for row in rows if not row.is_reference):
            packs[keys.pack(version.id, version.attempt, row.node, row.group, row.pack)].append(row)
    recorded = {keys.pack(version.id, version.attempt, *pack.place): pack.size for pack in version.packs}
    found = {info.key: info.size for info in version.store.list(keys.prefix(version.id, version.attempt))}
    for key in sorted(set(packs) | set(recorded)):
        _check_pack(key, packs[key], recorded.get(key, 0), found.get(key))
    _check_bases(version, set() if seen is None else seen)
    for fragment in version.fragments:
        for value in fragment.values:
            values.loads(value.text)
    chunks = [row for rows in version.chunks.values() for row in rows]
    raw, stored = sum(chunk.nbytes for chunk in chunks), sum(chunk.stored for chunk in chunks)
    if not (raw, stored) == (version.record.raw, version.record.stored) == (version.raw, version.bytes):
        raise Damaged("the sums of the manifest, the record and the root differ", subject=version.record.key())
    return packs


def _counted(version: Version, packs: Packs) -> Verified:
    chunks = sum(map(len, version.chunks.values()))
    counts = len(version.chunks), chunks, len(packs), version.raw, version.bytes
    return Verified(version.id, version.step, *counts, read=0, resumed=0)


def _check_bases(version: Version, seen: set[int]) -> None:
    """Check that bases are there, and that manifest, record and root name the same ones."""
    needed = tuple(sorted({base for fragment in version.fragments for base in fragment.bases}))
    if not needed == version.record.bases == version.entry.bases:
        bases = f"the manifest names {needed}, the record {version.record.bases}, the root {version.entry.bases}"
        raise Damaged(f"deltas to other versions than is said: {bases}", subject=version.record.key())
    for id in needed:
        base = version.bases.version(id)
        if id in seen:
            continue
        seen.add(id)
        try:
            checked_packs(base, seen)
        except Damaged as error:
            raise Damaged(f"{error.what}; version {version.id} is a delta to version {id}", subject=error.subject) from error
    version.reader().whole(chunk for rows in version.chunks.values() for chunk in rows)  # finds what each of them needs


def _check_pack(key: str, chunks: list[Chunk], recorded: int, found: int | None) -> None:
    """Check that the chunks, end to end, are the whole pack, and that record and store agree on its size. Derived chunks must
    have the place of another tensor's chunk."""
    end, places = 0, set[tuple[int, int]]()
    chunks.sort(key=lambda chunk: (chunk.start, chunk.coding.size))
    for chunk in chunks:
        if chunk.derivation is not None:
            continue
        if chunk.start != end:
            raise Damaged(f"the manifest leaves a gap or an overlap at byte {end}", subject=key)
        places.add((chunk.start, chunk.coding.size))
        end += chunk.coding.size
    for chunk in chunks:
        if chunk.derivation is not None and (chunk.start, chunk.coding.size) not in places:
            raise Damaged(
                f"{chunk.name!r} is derived from bytes {chunk.start} + {chunk.coding.size}, which are no chunk", subject=key
            )
    if found is None:
        raise Damaged("the pack is missing", subject=key)
    if not recorded == end == found:
        raise Damaged(f"the store holds {found} bytes, the record says {recorded}, the manifest {end}", subject=key)
