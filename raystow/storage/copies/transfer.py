"""Copies the objects of one version between stores, bit for bit. Never touches a root.

Every chunk is checked against its digest on the way. Objects that are at the destination are read there and stay, if they are
right: so an interrupted copy goes on where it ended. The record is written last, since a whole record claims a whole version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..checks.verify import checked_packs
from ..coding.digest import stored_digest
from ..errors import Damaged, NotFound
from ..format import keys
from ..format.manifest import Chunk
from ..format.signature import Signer
from ..format.version_record import PackInfo
from ..limits import MAX_SIGNATURE
from ..object_store import Buffer, ObjectStore
from ..versions.version import Version

MEMORY = 256 << 20
"""Bytes of packs in memory by default."""
_AT_ONCE = 8  # packs

Progress = Callable[[int], None]


def copy_objects(
    version: Version,
    replica: ObjectStore,
    *,
    memory: int = MEMORY,
    signer: Signer | None = None,
    progress: Progress = lambda nbytes: None,
) -> None:
    """Copy packs, fragments, signature and record. Takes memory for the manifest and ``memory`` bytes.

    Args:
        version: The version.
        replica: Where to.
        memory: Bytes of packs in memory at a time; a larger pack is copied alone.
        signer: Signs the copy; None keeps the signature, if there is one.
        progress: Called with the bytes of each pack that is at the replica.

    Raises:
        Damaged: An object of the source is not what was written; names it. The copy has no record then.
        StoreError: A store failed.
    """
    chunks = checked_packs(version)
    there = {info.key: info.size for info in replica.list(keys.prefix(version.id, version.attempt))}
    packs = list(version.packs)
    fitting = memory // max([1, *(pack.size for pack in packs)])
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, fitting)), "raystow-copy") as pool:

        def copy_one(pack: PackInfo) -> None:
            key = keys.pack(version.id, version.attempt, *pack.place)
            found = chunks.get(key, ())
            if there.get(key) != pack.size or wrong_chunk(replica.get_range(key, 0, pack.size), found):
                _copy_pack(version.store, replica, key, pack.size, found)
            progress(pack.size)

        try:
            for _ in pool.map(copy_one, packs):
                pass
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for info in version.record.fragments:
        key = keys.fragment(version.id, version.attempt, info.node)
        if there.get(key) != info.size or stored_digest(replica.get(key, max_bytes=info.size)).hex() != info.digest:
            replica.put(key, [version.fragment_bytes(info)])
    digest = bytes.fromhex(version.entry.digest)
    renewed = signer.sign(version.repository_id, version.id, version.attempt, digest) if signer is not None else None
    copy_signature(version.store, replica, keys.signature(version.id, version.attempt), renewed)
    replica.put(version.record_key, [version.record_bytes()])


def _copy_pack(source: ObjectStore, replica: ObjectStore, key: str, size: int, chunks: Sequence[Chunk]) -> None:
    for last in (False, True):  # bytes changed in transit are right the second time
        try:
            data = source.get_range(key, 0, size)
        except NotFound:
            raise Damaged("the pack is missing", subject=key) from None
        wrong = wrong_chunk(data, chunks)
        if wrong is None:
            replica.put(key, [data])
            return
        if last:
            where = f"tensor {wrong.name!r}, bytes {wrong.start} + {wrong.coding.size}"
            raise Damaged(f"{where}: the stored bytes do not match their digest", subject=key)


def copy_signature(source: ObjectStore, replica: ObjectStore, key: str, renewed: bytes | None) -> None:
    """Put the signature ``renewed`` at the replica; None: that of the source, if there is one."""
    if renewed is None:
        try:
            renewed = source.get(key, max_bytes=MAX_SIGNATURE)
        except NotFound:
            return
    replica.put(key, [renewed])


def wrong_chunk(data: Buffer, chunks: Sequence[Chunk]) -> Chunk | None:
    """The first chunk whose bytes in the pack do not match their digest."""
    view = memoryview(data)
    for chunk in chunks:
        if stored_digest(view[chunk.start : chunk.start + chunk.coding.size]) != chunk.stored_digest:
            return chunk
    return None
