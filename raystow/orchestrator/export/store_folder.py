"""Writes the files of an export to an object store, without a copy on this machine.

Objects cannot be renamed, so the export is marked as incomplete while it is written: the object ``MARKER`` is created first and
deleted last. It has the digest of the export, so that another call of the same export continues it, and every other one is
refused; and the token of the call that writes now: an earlier one, if it runs still, stops before its next file. Objects of
tensors appear when they are whole; those that make loaders accept the folder are written last.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from ...storage.errors import NotFound, PreconditionFailed, StateError, StoreUnavailable
from ...storage.object_store import StreamedStore, Tagged
from ...storage.runtime.clock import SYSTEM
from ...storage.stores import checks
from .finished_export import compare_files
from .output_folder import Content, FilePlan, WriteFile

MARKER = "raystow-incomplete.json"
_MAX_MARKER = 1 << 12


@contextlib.contextmanager
def new_store_folder(store: StreamedStore, plan: FilePlan) -> Iterator[WriteFile]:
    """Yield what writes the files of ``plan``. They are complete if the block succeeds; else another call continues them. If they
    are complete already, they are compared instead.

    Raises:
        StateError: There are other objects, the part of another export, or a file whose name no object can have.
        StoreError: The store failed, or another call has continued the export.
    """
    for name in (*plan.weights, *plan.others):
        if not checks.is_key(name):
            raise StateError("cannot be the name of an object", subject=name, remedy="rename the file, or export to a folder")
    found = {one.key: one.size for one in store.list("")}
    if found and MARKER not in found:
        yield compare_files(plan, found, store.get_range, subject=store.uri)
        return
    marker = _Marker(store, plan.source, plan.digest)
    marker.take(marker.read() if found else None)
    store.abort(one for one in store.unfinished() if one.key in plan.weights)  # of a killed process

    def write(name: str, nbytes: int, content: Content) -> None:
        if name not in plan.weights or found.get(name) != nbytes:  # an earlier call has not written it
            marker.check()
            store.put_stream(name, content, nbytes)

    yield write
    marker.check()
    store.delete([MARKER])


def discard_part(store: StreamedStore, source: str) -> None:
    """Delete the objects of an export that is not complete, if it is one of ``source``; see ``FilePlan``."""
    marker = _Marker(store, source)
    try:
        there = marker.read()
    except NotFound:
        return
    if _field(there.data, "source") != source:
        return
    marker.take(there)
    store.abort(store.unfinished())
    store.delete([one.key for one in store.list("") if one.key != MARKER])
    store.delete([MARKER])


class _Marker:
    """The marker of one call. ``digest``: of the export that it continues; empty for any."""

    def __init__(self, store: StreamedStore, source: str, digest: str = "") -> None:
        self._store, self._digest = store, digest
        what = "this export is not complete: the same call continues it"
        fields = {"raystow": what, "source": source, "digest": digest, "writer": SYSTEM.token()}
        self._data = json.dumps(fields).encode()

    def read(self) -> Tagged:
        """The marker that there is."""
        return self._store.get_tagged(MARKER, max_bytes=_MAX_MARKER)

    def take(self, before: Tagged | None) -> None:
        """Put this marker in the place of the one of an earlier call. Raises ``StateError`` if that is of another export."""
        if before is not None and self._digest not in ("", _field(before.data, "digest")):
            what, remedy = "has a part of another export", f"use a new address, or delete all objects below {self._store.uri}"
            raise StateError(what, subject=self._store.uri, remedy=remedy)
        try:
            self._store.put_if(MARKER, self._data, before.tag if before is not None else None)
        except PreconditionFailed as error:
            raise self._taken() from error

    def check(self) -> None:
        """Raise ``StoreUnavailable`` if another call has continued the export."""
        try:
            current = self._store.get(MARKER, max_bytes=_MAX_MARKER)
        except NotFound as error:  # and has ended it
            raise self._taken() from error
        if current != self._data:
            raise self._taken()

    def _taken(self) -> StoreUnavailable:
        return StoreUnavailable("another process writes this export", subject=self._store.uri, remedy="wait until it has ended")


def _field(marker: bytes, name: str) -> object:
    try:
        return dict(json.loads(marker)).get(name)
    except (ValueError, TypeError, RecursionError):  # not written by raystow
        return None
