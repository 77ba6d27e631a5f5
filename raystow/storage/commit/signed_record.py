"""How records of versions and of segments come into the store: readable, and signed if the writer has a key."""

from __future__ import annotations

from ..coding.digest import stored_digest
from ..errors import Damaged, SaveFailed, Unsupported
from ..format.segment_record import SegmentRecord
from ..format.signature import RecordKind, Signer
from ..format.version_record import VersionRecord
from ..object_store import ObjectStore


def put_signed(
    store: ObjectStore, record: VersionRecord | SegmentRecord, number: int, kind: RecordKind, signer: Signer | None
) -> tuple[bytes, bytes]:
    """Write record ``number`` of a kind and, with a ``signer``, its signature. Returns the record's bytes and their digest.

    Raises ``SaveFailed``, and writes nothing, if readers would refuse the record.
    """
    data = record.dump()
    try:
        record.load(data, record.key())
    except (Damaged, Unsupported) as error:
        raise SaveFailed(f"readers would refuse the record: {error.what}", subject=error.subject) from error
    digest = stored_digest(data)
    store.put(record.key(), [data])
    if signer is not None:
        signature = signer.sign(record.repository, number, record.attempt, digest, kind)
        store.put(kind.key(number, record.attempt), [signature])
    return data, digest
