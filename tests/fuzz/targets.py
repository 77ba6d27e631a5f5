"""What is fuzzed: every parser of stored bytes, each behind the digest that would stop all other inputs.

A target takes bytes and returns, or raises raystow's own error. Anything else is a finding. Hypothesis calls them in
``tests/property``, atheris in ``campaign.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from raystow.storage.coding import chunk
from raystow.storage.coding.chunk import Coding
from raystow.storage.coding.digest import stored_digest
from raystow.storage.coding.dtypes import DTYPES
from raystow.storage.errors import RaystowError
from raystow.storage.format import keys, records, values
from raystow.storage.format.root import Root
from raystow.storage.format.version_record import FragmentInfo, PackInfo, VersionRecord
from raystow.storage.repository import Repository, open_repository
from raystow.storage.stores import open_store

URI = "memory://fuzz"
ID, ATTEMPT = "cafe", "0" * 16
RECORD = keys.record(1, ATTEMPT)
PACK = bytes(range(32))
READ = 1 << 20
"""Bytes; a larger tensor is not read: ``tensors()`` tells how large one is before anybody takes memory for it."""


def sealed(body: bytes) -> bytes:
    """A record with a right first line, whatever follows it."""
    return b'{"digest": "%s",\n' % stored_digest(body).hex().encode() + body


def body(data: bytes) -> bytes:
    """The inverse."""
    return data.partition(b"\n")[2]


def repository_of(objects: dict[str, bytes]) -> Repository:
    """A repository of these objects, with a marker and an empty root unless they are given."""
    store = open_store(URI)
    store.delete([info.key for info in store.list("")])
    whole = {keys.MARKER: records.dump({"repository": ID, "created": 0}, keys.MARKER), keys.ROOT: Root(ID).dump()}
    for key, data in {**whole, **objects}.items():
        store.put(key, [data])
    return open_repository(URI)


def any_record(data: bytes) -> None:
    """Open a repository whose marker is these very bytes."""
    repository_of({keys.MARKER: data})


def marker(data: bytes) -> None:
    """The same with a right first line."""
    repository_of({keys.MARKER: sealed(data)})


def root(data: bytes) -> None:
    """List the versions, and look for what the newest holds."""
    latest = repository_of({keys.ROOT: sealed(data)}).latest()
    if latest is not None:
        assert latest.created < 1e12
        latest.tensors()


def record(data: bytes) -> None:
    """Look for what a version with this record holds; the record, written again, is the same."""
    whole = sealed(data)
    record = VersionRecord.load(whole, RECORD)
    again = record.dump()
    assert VersionRecord.load(again, record.key()).dump() == again
    latest = repository_of({RECORD: whole, keys.ROOT: root_of(record, whole)}).latest()
    assert latest is not None
    latest.tensors()


def root_of(record: VersionRecord, data: bytes) -> bytes:
    """A root that lists the version with this record."""
    entry = replace(record.entry(stored_digest(data), len(data)), id=1, attempt=ATTEMPT)
    return Root(ID, next_id=2, versions=(entry,)).dump()


def fragment(data: bytes) -> None:
    """Read everything in a version of this fragment and ``PACK``, then verify it; what is read twice is the same."""
    info = FragmentInfo(0, len(data), stored_digest(data).hex(), (0,), 1, 32, 32)
    record = VersionRecord(ID, 1, ATTEMPT, 1, 1, 1.0, 1, fragments=(info,), packs=(PackInfo(0, "weights", 0, len(PACK)),))
    whole, name, pack = record.dump(), keys.fragment(1, ATTEMPT, 0), keys.pack(1, ATTEMPT, 0, "weights", 0)
    opened = repository_of({keys.ROOT: root_of(record, whole), RECORD: whole, name: data, pack: PACK})
    latest = opened.latest()
    assert latest is not None
    for name, tensor in latest.tensors().items():
        if tensor.nbytes <= READ:
            allowed(lambda name=name: latest.read(name))
    allowed(lambda: latest.values(0))
    opened.verify(latest)


def allowed(work: Callable[[], object]) -> bool:
    """Whether the work ended well; if not, by one of raystow's errors."""
    try:
        work()
    except RaystowError as error:
        str(error)  # what says it must not fail either
        return False
    return True


def value(data: bytes) -> None:
    """A value's text; what comes out goes in again, to the same text in the end."""
    found = values.loads(data.decode("utf-8", "replace"))
    text = values.dumps(found)
    assert values.dumps(values.loads(text)) == text


CODECS = ("raw", "zstd", "deflate", "pack7", "ans", "lzw")


def described(coding: Coding, kind: str, nbytes: int, stored: bytes) -> bytes:
    """What ``pack`` takes: a description, a line feed, and the bytes in the pack."""
    fields = asdict(coding) | {"streams": coding.sizes.tolist()}
    return json.dumps([*fields.values(), kind, nbytes]).encode() + b"\n" + stored


def pack(data: bytes) -> None:
    """Decode a chunk by its description. Of the right types, as Parquet gives them; the numbers may be anything."""
    head, _, stored = data.partition(b"\n")
    try:
        planes, rotated, codecs, sizes, streams, stream, *base, kind, nbytes = json.loads(head)
        numbers = [(stream, 32), (nbytes, 64), *((n, 64) for n in sizes), *((n, 32) for n in streams)]
        if not all(type(n) is int and -(1 << bits) <= 2 * n < 1 << bits for n, bits in numbers) or not all(
            type(c) is str for c in codecs
        ):
            return
        dtype = DTYPES[kind]
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    if min(sizes, default=-1) < 0 or not 0 <= nbytes <= READ:  # refused with the manifest
        return
    delta = base not in ([], [None])
    coding = Coding(
        planes is True, rotated is True, tuple(codecs), tuple(sizes), chunk.packed(streams), stream, 1 if delta else None
    )
    chunk.decode(coding, dtype, np.frombuffer(stored, np.uint8), np.empty(nbytes, np.uint8), np.zeros(nbytes, np.uint8))


def key(data: bytes) -> None:
    """What a listing may hold. A key that is understood is one that raystow would have made."""
    text = data.decode("utf-8", "replace")
    if keys.attempt_of(text) is not None:
        assert text.startswith(keys.prefix(*keys.attempt_of(text)))
    keys.leased(text)


TARGETS: dict[str, Callable[[bytes], Any]] = {
    target.__name__: target for target in (any_record, marker, root, record, fragment, value, pack, key)
}
