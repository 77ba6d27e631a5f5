"""Versions whose rows a test decides on itself: any boxes, any coding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from raystow.storage import keys
from raystow.storage.chunk import Encoder
from raystow.storage.committer import Committer
from raystow.storage.digest import raw_digest, stored_digest
from raystow.storage.dtypes import dtype
from raystow.storage.manifest import Box, Chunk, Fragment, Value, path_text
from raystow.storage.version import Version
from raystow.storage.version_record import FragmentInfo, PackInfo, VersionRecord

Cut = tuple[np.ndarray, Sequence[Box]]


def whole(array: np.ndarray) -> Cut:
    return array, [((0,) * array.ndim, array.shape)]


def rows_and_pack(tensors: Mapping[str, Cut]) -> tuple[list[Chunk], bytes]:
    rows: list[Chunk] = []
    pack = b""
    encoder = Encoder(1 << 20)
    for name, (array, boxes) in tensors.items():
        for offset, extent in boxes:
            part = array[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
            raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            coded, coding = encoder.encode(raw, dtype(array.dtype.name))
            stored = coded.tobytes()
            rows.append(
                Chunk(
                    name=name,
                    path=path_text((name,)),
                    kind="array",
                    dtype=array.dtype.name,
                    shape=array.shape,
                    offset=offset,
                    extent=extent,
                    node=0,
                    group="weights",
                    pack=0,
                    start=len(pack),
                    coding=coding,
                    raw_digest=raw_digest(raw),
                    stored_digest=stored_digest(stored),
                )
            )
            pack += stored
    return rows, pack


def empty_record(committer: Committer, step: int = 0) -> VersionRecord:
    id, attempt = committer.reserve()
    return VersionRecord(committer.repository.id, id, attempt, committer.epoch, step, created=1.5, world_size=1)


def write(committer: Committer, tensors: Mapping[str, Cut], values: Sequence[Value] = ()) -> Version:
    """Commit a version that holds these arrays, each cut into these boxes, right or wrong."""
    record = empty_record(committer)
    rows, pack = rows_and_pack(tensors)
    data = Fragment(0, tuple(rows), tuple(values)).dump()
    store = committer.repository.store
    store.put(keys.pack(record.id, record.attempt, 0, "weights", 0), [pack])
    store.put(keys.fragment(record.id, record.attempt, 0), [data])
    raw = sum(math.prod(row.extent) * dtype(row.dtype).itemsize for row in rows)
    info = FragmentInfo(0, len(data), stored_digest(data).hex(), (0,), len(rows), raw, len(pack))
    fields = {**vars(record), "fragments": (info,), "packs": (PackInfo(0, "weights", 0, len(pack)),)}
    return committer.commit(VersionRecord(**fields))
