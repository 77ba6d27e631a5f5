"""Tests whether a store honours conditional writes: some servers accept the conditions and ignore them.

Run when a repository is created, and by ``raystow doctor``. Five requests, one object under ``probe/``, removed at the end.
"""

from __future__ import annotations

import contextlib

from ..errors import PreconditionFailed, StoreError, UnsafeStore
from ..format import keys
from ..object_store import ObjectStore
from ..runtime.clock import SYSTEM, Clock

_MAX_BYTES = 4096
_REMEDY = "use a store with conditional writes (AWS S3, Ceph 20, R2, Google, Azure, a local disk), or a newer release of this one"


def probe_conditional_writes(store: ObjectStore, clock: Clock = SYSTEM) -> None:
    """Raise ``UnsafeStore`` if two writers of ``store`` could both win, or the right one cannot."""
    token = clock.token()
    key = keys.trial(token)
    try:
        _probe(store, key, token)
    finally:
        # The result matters more than a left-over of some bytes.
        with contextlib.suppress(StoreError):
            store.delete([key])


def _probe(store: ObjectStore, key: str, token: str) -> None:
    subject = f"{store.uri}/{key}"
    first = _wins(store, key, f"first {token}".encode(), tag=None)
    _loses(store, key, tag=None, step="two writers both created one object")
    second = _wins(store, key, f"second {token}".encode(), tag=first)
    if second == first:
        raise UnsafeStore("two contents have the same tag", subject=subject, remedy=_REMEDY)
    _loses(store, key, tag=first, step="a writer with an old tag and one with the right tag both replaced one object")
    found = store.get_tagged(key, max_bytes=_MAX_BYTES)
    if found.data != f"second {token}".encode() or found.tag != second:
        raise UnsafeStore("a read after a write does not show that write", subject=subject, remedy=_REMEDY)


def _wins(store: ObjectStore, key: str, data: bytes, *, tag: str | None) -> str:
    try:
        return store.put_if(key, data, tag)
    except PreconditionFailed as error:
        what = "a conditional write was refused although its condition held"
        raise UnsafeStore(what, subject=f"{store.uri}/{key}", remedy=_REMEDY) from error


def _loses(store: ObjectStore, key: str, *, tag: str | None, step: str) -> None:
    try:
        store.put_if(key, b"this must not be written", tag)
    except PreconditionFailed:
        return
    raise UnsafeStore(step, subject=f"{store.uri}/{key}", remedy=_REMEDY)
