"""The fuzz targets: every parser of stored bytes, and of files of other programs. The digests are valid, because a digest check
would reject all other inputs.

A target takes bytes and returns, or raises a raystow error. Any other error is a finding. Hypothesis calls the targets in
``tests/property``, atheris calls them in ``campaign.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from raystow.orchestrator.export.safetensors_file import source_tensors
from raystow.orchestrator.restore.what_if import plan_world
from raystow.state import value_text as texts
from raystow.storage.coding import chunk
from raystow.storage.coding.chunk import Coding
from raystow.storage.coding.digest import stored_digest
from raystow.storage.coding.dtypes import DTYPES
from raystow.storage.errors import RaystowError
from raystow.storage.format import keys, records, values
from raystow.storage.format.manifest import Fragment, Value
from raystow.storage.format.pack_sizes import pack_sizes as packs_named
from raystow.storage.format.root import Root
from raystow.storage.format.version_record import FragmentInfo, PackInfo, VersionRecord
from raystow.storage.limits import MAX_NUMBER
from raystow.storage.repository import Repository, open_repository
from raystow.storage.retention.policy import Policy
from raystow.storage.stores import open_store
from raystow.storage.versions.value_tree import container

URI = "memory://fuzz"
ID, ATTEMPT = "cafe", "0" * 16
RECORD = keys.record(1, ATTEMPT)
PACK = bytes(range(32))
READ = 1 << 20
"""Largest tensor in bytes that is read: ``tensors()`` returns the size of a tensor before memory is allocated."""


def sealed(body: bytes) -> bytes:
    """Return a record of this body with a valid digest line."""
    return b'{"digest": "%s",\n' % stored_digest(body).hex().encode() + body


def body(data: bytes) -> bytes:
    """Return the body of a record (the inverse of ``sealed``)."""
    return data.partition(b"\n")[2]


def repository_of(objects: dict[str, bytes]) -> Repository:
    """Return a repository of these objects, with a default marker and an empty root."""
    store = open_store(URI)
    store.delete([info.key for info in store.list("")])
    whole = {keys.MARKER: records.dump({"repository": ID, "created": 0}, keys.MARKER), keys.ROOT: Root(ID).dump()}
    for key, data in {**whole, **objects}.items():
        store.put(key, [data])
    return open_repository(URI)


def any_record(data: bytes) -> None:
    """Open a repository whose marker is these bytes."""
    repository_of({keys.MARKER: data})


def marker(data: bytes) -> None:
    """Open a repository whose marker has this body and a valid digest line."""
    repository_of({keys.MARKER: sealed(data)})


def root(data: bytes) -> None:
    """List the versions and the tensors of the newest one."""
    latest = repository_of({keys.ROOT: sealed(data)}).latest()
    if latest is not None:
        assert latest.created < 1e12
        latest.tensors()


def record(data: bytes) -> None:
    """List the tensors of a version with this record; check that the record is unchanged when it is written again."""
    whole = sealed(data)
    record = VersionRecord.load(whole, RECORD)
    again = record.dump()
    assert VersionRecord.load(again, record.key()).dump() == again
    latest = repository_of({RECORD: whole, keys.ROOT: root_of(record, whole)}).latest()
    assert latest is not None
    latest.tensors()


def root_of(record: VersionRecord, data: bytes) -> bytes:
    """Return a root that lists the version of this record."""
    entry = replace(record.entry(stored_digest(data), len(data)), id=1, attempt=ATTEMPT)
    return Root(ID, next_id=2, versions=(entry,)).dump()


def fragment(data: bytes) -> None:
    """Read every tensor of a version of this fragment and ``PACK``, then verify the version."""
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


def pack_sizes(data: bytes) -> None:
    """List the packs that a fragment names; check that they are those of its rows."""
    key, sizes, rows = keys.fragment(1, ATTEMPT, 0), [], []
    listed = allowed(lambda: sizes.append(packs_named(data, key)))
    if allowed(lambda: rows.append(Fragment.load(data, 0, key).packs)) and listed:
        assert sizes == rows


def allowed(work: Callable[[], object]) -> bool:
    """Return whether the work succeeded; any error that is not a raystow error is raised."""
    try:
        work()
    except RaystowError as error:
        str(error)  # formatting the message must not fail
        return False
    return True


def value(data: bytes) -> None:
    """Parse the text of a value; check that its text is stable when it is parsed and written again."""
    found = values.loads(data.decode("utf-8", "replace"))
    text = values.dumps(found)
    assert values.dumps(values.loads(text)) == text


CODECS = ("raw", "zstd", "deflate", "pack7", "ans", "lzw")


def described(coding: Coding, kind: str, nbytes: int, stored: bytes) -> bytes:
    """Return an input of ``pack``: a description, a line feed, and the stored bytes."""
    fields = structs.asdict(coding) | {"streams": coding.sizes.tolist()}
    return json.dumps([*fields.values(), kind, nbytes]).encode() + b"\n" + stored


def pack(data: bytes) -> None:
    """Decode a chunk by its description. Its types are those that Parquet guarantees; its numbers are arbitrary."""
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
    if min(sizes, default=-1) < 0 or not 0 <= nbytes <= READ:  # the parser of the manifest rejects these
        return
    delta = base not in ([], [None])
    coding = Coding(
        planes is True, rotated is True, tuple(codecs), tuple(sizes), chunk.packed(streams), stream, 1 if delta else None
    )
    chunk.decode(coding, dtype, np.frombuffer(stored, np.uint8), np.empty(nbytes, np.uint8), np.zeros(nbytes, np.uint8))


def key(data: bytes) -> None:
    """Parse a key of a listing; check that a key that is accepted begins with the prefix of its attempt."""
    text = data.decode("utf-8", "replace")
    if keys.attempt_of(text) is not None:
        assert text.startswith(keys.prefix(*keys.attempt_of(text)))
    keys.leased(text)


def value_text(data: bytes) -> None:
    """Parse the text of a value of any structure, as an entry of the journal has it."""
    texts.loads(data.decode("utf-8", "replace"))


def value_tree(data: bytes) -> None:
    """Make a container of the rows of a manifest: a JSON list of paths and texts."""
    try:
        rows = [Value("w", path + "", text + "", (0,)) for path, text in json.loads(data)]
    except (ValueError, TypeError, RecursionError):
        return
    container("state", rows)


def safetensors(data: bytes) -> None:
    """Parse the header of a safetensors file, and make an array of each tensor without elements."""
    for tensor in source_tensors(data, 8 + len(data)):
        np.empty(tensor.shape, f"V{DTYPES[tensor.dtype].itemsize}")


def plan(data: bytes) -> None:
    """Plan a restore of a version with this record, and the fragment of its seed, by as many ranks as saved it."""
    from .seeds import fragments  # which imports this module

    whole = sealed(data)
    record = VersionRecord.load(whole, RECORD)
    name = keys.fragment(1, ATTEMPT, 0)
    latest = repository_of({RECORD: whole, keys.ROOT: root_of(record, whole), name: fragments()[0]}).latest()
    assert latest is not None
    plan_world(latest, latest.world_size, per_node=8)


def prune(data: bytes) -> None:
    """Plan to thin all versions of this root but the newest."""
    planned = repository_of({keys.ROOT: sealed(data)}).plan_retention(Policy(keep_last=MAX_NUMBER, resumable=1), compact=True)
    for entry in (*planned.thinned, *planned.compacted):
        allowed(lambda entry=entry: planned.replacement(entry))


_OF_RECORDS = any_record, marker, root, record, plan, prune
_OF_PARTS = fragment, pack_sizes, pack, value, value_text, value_tree, key, safetensors
TARGETS: dict[str, Callable[[bytes], Any]] = {target.__name__: target for target in (*_OF_RECORDS, *_OF_PARTS)}
