"""Verification: reads every byte of a version and holds it against the chain of digests that ends in the root."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from . import keys, values
from .boxes import tile
from .errors import Damaged
from .manifest import Chunk
from .object_store import ObjectStore
from .version import Version


@dataclass(frozen=True)
class Verified:
    """What a verification read: counts, and bytes after decoding and in the store."""

    version: int
    step: int
    tensors: int
    chunks: int
    raw: int
    stored: int


def verify(version: Version, store: ObjectStore, progress: Callable[[int], None] = lambda nbytes: None) -> Verified:
    """Read and check the record, every fragment, every chunk, and that chunks fill the packs without a gap or overlap.

    Raises ``Damaged`` naming the first object found wrong. ``progress`` is told the decoded bytes of each chunk. Memory: one
    chunk and 16 MiB for each reading thread.
    """
    packs: dict[tuple[int, str, int], list[Chunk]] = defaultdict(list)
    for rows in version.chunks.values():
        if not tile([row.box for row in rows], ((0,) * len(rows[0].shape), rows[0].shape)):
            raise Damaged("the manifest's chunks do not hold each element exactly once", subject=rows[0].name)
        for row in rows:
            packs[row.node, row.group, row.pack].append(row)
    sizes = {(p.node, p.group, p.number): p.size for p in version.record.packs}
    found = {info.key: info.size for info in store.list(keys.prefix(version.id, version.attempt))}
    for pack in sorted(set(packs) | set(sizes)):
        key = keys.pack(version.id, version.attempt, *pack)
        _check_pack(key, packs[pack], sizes.get(pack, 0), found.get(key))
    chunks = [row for rows in version.chunks.values() for row in rows]
    version.reader().check(chunks, progress)
    for fragment in version.fragments:
        for value in fragment.values:
            values.loads(value.text)
    raw, stored = sum(chunk.nbytes for chunk in chunks), sum(chunk.coding.size for chunk in chunks)
    if not (raw, stored) == (version.record.raw, version.record.stored) == (version.raw, version.bytes):
        raise Damaged("the sums of the manifest, the record and the root differ", subject=version.record.key())
    return Verified(version.id, version.step, len(version.chunks), len(chunks), raw, stored)


def _check_pack(key: str, chunks: list[Chunk], recorded: int, found: int | None) -> None:
    """The chunks, laid end to end, are the whole pack, and the record and the store give it that size."""
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.start, chunk.coding.size)):
        if chunk.start != end:
            raise Damaged(f"the manifest leaves a gap or an overlap at byte {end}", subject=key)
        end += chunk.coding.size
    if found is None:
        raise Damaged("the pack is missing", subject=key)
    if not recorded == end == found:
        raise Damaged(f"the store holds {found} bytes, the record says {recorded}, the manifest {end}", subject=key)
