"""Buckets with versioning, in which deleting frees no space."""

from __future__ import annotations

from ..storage.object_store import ObjectStore

NEEDS_A_RULE = "give it a lifecycle rule with NoncurrentVersionExpiration and ExpiredObjectDeleteMarker, or suspend versioning"


def keeps_deleted(store: ObjectStore) -> bool:
    """Whether a store is a bucket that keeps what is deleted. Raises ``StoreError`` if that is not known."""
    if not store.uri.startswith("s3:"):
        return False
    from ..storage.stores.s3 import S3Store  # imports boto3

    return isinstance(store, S3Store) and store.keeps_deleted()
