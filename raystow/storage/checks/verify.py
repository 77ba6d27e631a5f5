"""Verification checks a version against the chain of digests that ends in the root: its packs' sizes, or every byte."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..errors import Damaged
from ..format import keys, values
from ..format.boxes import Measure
from ..format.manifest import Chunk, Fragment
from ..versions.contents import TensorSums
from ..versions.runs import ByteRun
from ..versions.version import Version
from .stored_sizes import StoredSizes
from .verify_progress import VerifyJournal

MEMORY = 512 << 20
"""Bytes of chunks that a deep verification takes at a time."""


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


@dataclass(frozen=True)
class StoredPack:
    """A pack, and the rows that name it, in the order of storage. ``size``: what the record says."""

    key: str
    size: int
    chunks: list[Chunk]


def verify_sizes(version: Version) -> Verified:
    """Check record and manifest by their digests, packs by their sizes. Reads no pack. Takes memory for some fragments, and for
    the names of tensors.

    Raises:
        Damaged: Names the first object that is wrong.
    """
    return _checked(version, set())


def verify_bytes(
    version: Version,
    progress: Callable[[int], None] = lambda nbytes: None,
    *,
    journal: VerifyJournal | None = None,
    memory: int = MEMORY,
) -> Verified:
    """Call ``verify_sizes``, then read and decode every pack that is not in the journal, and check both digests of each chunk.

    ``progress`` is called with the decoded bytes of each chunk, and with those of each pack in the journal. A pack that was
    read to its end is added to the journal. Takes memory for some fragments and ``memory`` bytes of chunks, or one larger chunk.
    """
    found, resumed = verify_sizes(version), 0
    reader, record = version.reader(), version.entry.digest
    left = Counter[str]()  # runs of each pack that was begun

    def due() -> Iterator[tuple[str, ByteRun]]:
        nonlocal resumed
        for info, fragment in version.walk():
            runs = [(_noted(version, info.node, run), run) for run in reader.whole(fragment.chunks)]
            done = {noted for noted, _ in runs if journal is not None and (record, noted) in journal}
            resumed += sum(sum(chunk.stored for chunk in pack.chunks) for pack in packs(version, fragment) if pack.key in done)
            progress(sum(piece.chunk.nbytes for noted, run in runs if noted in done for piece in run.pieces))
            left.update(noted for noted, _ in runs if noted not in done)
            yield from ((noted, run) for noted, run in runs if noted not in done)

    for noted in reader.check(due(), progress, memory=memory):
        left[noted] -= 1
        if not left[noted]:
            del left[noted]
            if journal is not None:
                journal.add(record, noted)
    return replace(found, read=version.bytes - resumed, resumed=resumed)


def packs(version: Version, fragment: Fragment) -> list[StoredPack]:
    """The packs of a node, in the order of keys, whether its rows or the record name them."""
    rows = defaultdict[tuple[str, int], list[Chunk]](list)
    for chunk in fragment.chunks:
        if not chunk.is_reference:
            rows[chunk.group, chunk.pack].append(chunk)
    sizes = fragment.packs if version.record.packs is None else version.manifest.listed_packs.get(fragment.node, {})
    found = (
        StoredPack(
            keys.pack(version.id, version.attempt, fragment.node, *place),
            sizes.get(place, 0),
            sorted(rows[place], key=lambda chunk: (chunk.start, chunk.coding.size)),
        )
        for place in rows.keys() | sizes.keys()
    )
    return sorted(found, key=lambda pack: pack.key)


def _noted(version: Version, node: int, run: ByteRun) -> str:
    """What the journal notes when a run's pack is done: a pack of a base is done for one node at a time."""
    return run.key if run.version == version.id else f"{run.key} for node {node}"


def _checked(version: Version, seen: set[int]) -> Verified:
    """As ``verify_sizes``. ``seen``: ids of bases that need not be checked again; those that are checked are added."""
    record, tensors = version.record, TensorSums(repr(version), Measure(bytes.fromhex(version.entry.digest)))
    sizes = StoredSizes(version.store, version.id, version.attempt)
    needed, count = set[int](), 0
    for _, fragment in version.walk():
        tensors.add(fragment.chunks)
        for pack in packs(version, fragment):
            _check_pack(pack, sizes.get(pack.key))
            count += 1
        for value in fragment.values:
            values.loads(value.text)
        needed.update(fragment.bases)
    for node in version.manifest.listed_packs.keys() - {info.node for info in record.fragments}:
        for pack in packs(version, Fragment(node, (), ())):
            _check_pack(pack, sizes.get(pack.key))
            count += 1
    tensors.check()
    _check_bases(version, tuple(sorted(needed)), seen)
    every = tensors.sums.values()
    chunks, raw, stored = sum(one.chunks for one in every), sum(one.raw for one in every), sum(one.stored for one in every)
    if not (raw, stored) == (record.raw, record.stored) == (version.raw, version.bytes):
        raise Damaged("the sums of the manifest, the record and the root differ", subject=record.key())
    return Verified(version.id, version.step, len(tensors.sums), chunks, count, raw, stored, read=0, resumed=0)


def _check_bases(version: Version, needed: tuple[int, ...], seen: set[int]) -> None:
    """Check that bases are there, and that manifest, record and root name the same ones."""
    if not needed == version.record.bases == version.entry.bases:
        bases = f"the manifest names {needed}, the record {version.record.bases}, the root {version.entry.bases}"
        raise Damaged(f"deltas to other versions than is said: {bases}", subject=version.record.key())
    for id in needed:
        base = version.bases.version(id)
        if id in seen:
            continue
        seen.add(id)
        try:
            _checked(base, seen)
        except Damaged as error:
            raise Damaged(f"{error.what}; version {version.id} is a delta to version {id}", subject=error.subject) from error
    if needed:
        for _, fragment in version.walk():
            version.reader().whole(fragment.chunks)  # finds what each of them needs


def _check_pack(pack: StoredPack, found: int | None) -> None:
    """Check that the chunks, end to end, are the whole pack, and that record and store agree on its size. Derived chunks must
    have the place of another tensor's chunk."""
    key, chunks, end, places = pack.key, pack.chunks, 0, set[tuple[int, int]]()
    for chunk in chunks:
        if chunk.derivation is not None:
            continue
        if chunk.start != end:
            raise Damaged(f"the manifest leaves a gap or an overlap at byte {end}", subject=key)
        size = chunk.coding.size
        places.add((end, size))
        end += size
    for chunk in chunks:
        if chunk.derivation is not None and (chunk.start, chunk.coding.size) not in places:
            raise Damaged(
                f"{chunk.name!r} is derived from bytes {chunk.start} + {chunk.coding.size}, which are no chunk", subject=key
            )
    if found is None:
        raise Damaged("the pack is missing", subject=key)
    if not pack.size == end == found:
        raise Damaged(f"the store holds {found} bytes, the record says {pack.size}, the manifest {end}", subject=key)
