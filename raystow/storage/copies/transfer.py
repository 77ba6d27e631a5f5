"""Copies the objects of one version between stores, bit for bit. Never touches a root.

Every chunk is checked against its digest on the way. Objects that are at the destination are read there and stay, if they are
right: so an interrupted copy goes on where it ended. The record is written last, since a whole record claims a whole version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..checks.stored_sizes import StoredSizes
from ..checks.verify import StoredPack, packs, verify_sizes
from ..coding.digest import stored_digest
from ..errors import Damaged, NotFound
from ..format import keys
from ..format.manifest import Chunk
from ..format.signature import Signer
from ..limits import MAX_SIGNATURE
from ..object_store import Buffer, ObjectStore
from ..runtime.bounded_map import bounded_map
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
    """Copy packs, fragments, signature and record. Takes memory for some fragments, the names of tensors, and ``memory`` bytes.

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
    verify_sizes(version)
    there = StoredSizes(replica, version.id, version.attempt)

    def copy_one(pack_found: tuple[StoredPack, int | None]) -> None:
        pack, found = pack_found
        if found != pack.size or wrong_chunk(replica.get_range(pack.key, 0, pack.size), pack.chunks):
            _copy_pack(version.store, replica, pack)
        progress(pack.size)

    every = ((pack, there.get(pack.key)) for _, fragment in version.walk() for pack in packs(version, fragment))
    with ThreadPoolExecutor(_AT_ONCE, "raystow-copy") as pool:
        for _ in bounded_map(pool, copy_one, every, cost=lambda pack_found: pack_found[0].size, limit=memory):
            pass
    for info in sorted(version.record.fragments, key=version.manifest.key):
        key = version.manifest.key(info)
        if there.get(key) != info.size or stored_digest(replica.get(key, max_bytes=info.size)).hex() != info.digest:
            replica.put(key, [version.fragment_bytes(info)])
    digest = bytes.fromhex(version.entry.digest)
    renewed = signer.sign(version.repository_id, version.id, version.attempt, digest) if signer is not None else None
    copy_signature(version.store, replica, keys.signature(version.id, version.attempt), renewed)
    replica.put(version.record_key, [version.record_bytes()])


def _copy_pack(source: ObjectStore, replica: ObjectStore, pack: StoredPack) -> None:
    for last in (False, True):  # bytes changed in transit are right the second time
        try:
            data = source.get_range(pack.key, 0, pack.size)
        except NotFound:
            raise Damaged("the pack is missing", subject=pack.key) from None
        wrong = wrong_chunk(data, pack.chunks)
        if wrong is None:
            replica.put(pack.key, [data])
            return
        if last:
            where = f"tensor {wrong.name!r}, bytes {wrong.start} + {wrong.coding.size}"
            raise Damaged(f"{where}: the stored bytes do not match their digest", subject=pack.key)


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
