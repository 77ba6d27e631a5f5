"""Writes the files of an export to an object store, without a copy on this machine.

Objects cannot be renamed, so the export is marked as incomplete while it is written: the object ``MARKER`` is created first and
deleted last. It has the digest of the export, so that another call of the same export continues it, and every other one is
refused. Objects of tensors appear when they are whole; those that make loaders accept the folder are written last.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from ...storage.errors import PreconditionFailed, StateError
from ...storage.object_store import StreamedStore
from ...storage.stores import checks
from .output_folder import Content, FilePlan, WriteFile

MARKER = "raystow-incomplete.json"
_MAX_MARKER = 1 << 12


@contextlib.contextmanager
def new_store_folder(store: StreamedStore, plan: FilePlan) -> Iterator[WriteFile]:
    """Yield what writes the files of ``plan``. They are complete if the block succeeds; else another call continues them.

    Raises:
        StateError: There are other objects, the part of another export, or a file whose name no object can have.
        StoreError: The store failed.
    """
    for name in (*plan.weights, *plan.others):
        if not checks.is_key(name):
            raise StateError("cannot be the name of an object", subject=name, remedy="rename the file, or export to a folder")
    marker = json.dumps({"raystow": "this export is not complete: the same call continues it", "digest": plan.digest}).encode()
    found = {one.key: one.size for one in store.list("")}
    if found and MARKER not in found:
        raise StateError("is not an empty folder", subject=store.uri, remedy="use a new one")
    if not found:
        with contextlib.suppress(PreconditionFailed):  # another process has begun: its marker says with which export
            store.put_if(MARKER, marker, None)
    if store.get(MARKER, max_bytes=_MAX_MARKER) != marker:
        what, remedy = "has a part of another export", f"use a new address, or delete all objects below {store.uri}"
        raise StateError(what, subject=store.uri, remedy=remedy)
    store.abort(one for one in store.unfinished() if one.key in plan.weights)  # of a killed process

    def write(name: str, nbytes: int, content: Content) -> None:
        if name not in plan.weights or found.get(name) != nbytes:  # an earlier call has not written it
            store.put_stream(name, content, nbytes)

    yield write
    store.delete([MARKER])
