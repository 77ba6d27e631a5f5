"""Valid inputs of each target, from which fuzzing starts."""

from __future__ import annotations

import json
import zlib
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from raystow.state import value_text
from raystow.storage.coding.chunk import ChunkEncoder, Coding, packed
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.dtypes import dtype
from raystow.storage.format import keys, records, values
from raystow.storage.format.manifest import Chunk, Fragment, Value
from raystow.storage.format.replica_difference import ReplicaDifference
from raystow.storage.format.root import Dropped, Entry, RolledBack, Root
from raystow.storage.format.version_record import FragmentInfo, PackInfo, VersionRecord

from .targets import ATTEMPT, ID, PACK, body, described

MARKER = records.dump({"repository": ID, "created": 1.5}, keys.MARKER)
ENTRY = Entry(1, ATTEMPT, "ab" * 32, 663, 100, 1.25, 24, 20)
ROOT = Root(ID, 3, "me", 9, "w", {"best": 1}, (ENTRY,), (Dropped(2, ATTEMPT, 2.5),), 1)
FORKED = replace(ROOT, rollbacks=2, rolled_back=(RolledBack(replace(ENTRY, id=3), 1, 3.5),))
RECORD = VersionRecord(
    ID,
    1,
    ATTEMPT,
    3,
    100,
    1.25,
    2,
    {"loss": float("inf"), "n": 2**70, "raw": b"\0", "z": complex(1, float("nan"))},
    {"raystow": "1"},
    (FragmentInfo(0, 10, "ab" * 32, (0, 1), 3, 24, 20),),
    (PackInfo(0, "weights", 0, 20),),
    {"deflate": "asked for"},
    differences=(ReplicaDifference("w", "tensor", (1,), (0,), 1, 1, "unknown", (3, 4), 1, 1),),
)
LIKE_NEW = replace(RECORD, fragments=(replace(RECORD.fragments[0], packs=1, stall=0.5),), packs=None)


def row(**fields: Any) -> dict[str, Any]:
    """Return a valid chunk row of eight elements, stored raw."""
    part = np.frombuffer(PACK, np.uint8)
    whole: dict[str, Any] = {
        "name": "w",
        "path": '["w"]',
        "kind": "array",
        "ranks": None,
        "value": None,
        "dtype": "float32",
        "shape": [2, 4],
        "offset": [0, 0],
        "extent": [2, 4],
        "group": "weights",
        "pack": 0,
        "start": 0,
        "base": None,
        "transform": [],
        "codecs": ["raw"],
        "stored": [32],
        "stream": 65536,
        "streams": [],
        "raw_digest": raw_digest(part),
        "stored_digest": stored_digest(part),
    }
    return {**whole, **fields}


def value_row(**fields: Any) -> dict[str, Any]:
    """Return a valid value row."""
    whole = dict.fromkeys(row()) | {"name": "lr", "path": '["lr"]', "kind": "value", "ranks": [0, 1], "value": "0.1"}
    return {**whole, **fields}


def fragments() -> list[bytes]:
    """Return a fragment with a chunk and a value, and a fragment without rows."""
    one = row()
    chunk = Chunk(
        *(one[name] for name in ("name", "path", "kind", "dtype")),
        *(tuple(one[name]) for name in ("shape", "offset", "extent")),
        0,
        "weights",
        0,
        0,
        Coding(False, False, ("raw",), (32,)),
        one["raw_digest"],
        one["stored_digest"],
    )
    return [Fragment(0, (chunk,), (Value("lr", '["lr"]', "0.1", (0, 1)),)).dump(), Fragment(0, (), ()).dump()]


def planned(world_size: int = 2) -> VersionRecord:
    """Return the record of a version of the first of ``fragments``."""
    data = fragments()[0]
    info = FragmentInfo(0, len(data), stored_digest(data).hex(), (0, 1), 1, 32, 32)
    return VersionRecord(ID, 1, ATTEMPT, 1, 1, 1.0, world_size, fragments=(info,), packs=(PackInfo(0, "weights", 0, len(PACK)),))


def packs() -> list[bytes]:
    """Return chunks of every codec that a CPU decodes."""
    random, found = np.random.default_rng(1), []
    weights = random.normal(0, 0.02, 3000).astype(np.float32)
    for kind, array in (("float32", weights), ("float32", weights**2), ("uint8", np.arange(4096) // 9), ("bool", weights > 0)):
        raw = np.ascontiguousarray(array, None if kind == "float32" else np.uint8).view(np.uint8)
        stored, coding = ChunkEncoder(1 << 20).encode(raw, dtype(kind))
        found.append(described(coding, kind, raw.size, stored.tobytes()))
        found.append(described(structs.replace(coding, rotated=False, base=3), kind, raw.size, stored.tobytes()))
    deflated = [zlib.compress(bytes(5000), 9, -15), zlib.compress(b"raystow" * 100, 1, -15)]
    sizes = tuple(map(len, deflated))
    found.append(
        described(Coding(False, False, ("deflate",), (sum(sizes),), packed(sizes), 5000), "uint8", 5700, b"".join(deflated))
    )
    return found


def seeds() -> dict[str, list[bytes]]:
    """Return the seeds by the name of the target."""
    plain = [None, True, -1, 1.5, "text", b"bytes", 2**70, float("nan"), complex(1, float("inf")), {}, [], ()]
    return {
        "any_record": [MARKER],
        "marker": [body(MARKER), body(records.dump({"repository": ID, "signed_by": ["ab" * 32]}, keys.MARKER))],
        "root": [body(ROOT.dump()), body(Root(ID).dump()), body(FORKED.dump())],
        "record": [body(RECORD.dump()), body(LIKE_NEW.dump())],
        "fragment": fragments(),
        "pack_sizes": fragments(),
        "value": [values.dumps(value).encode() for value in plain],
        "pack": packs(),
        "value_text": [value_text.dumps({"a": [1, (2.5, None)], "t": np.ones(3), "q": deque([1], 2), 7: {"x"}}).encode()],
        "value_tree": [json.dumps([['["state", "a", {"list": 0}]', "1"], ['["state", "b"]', '{"empty": "dict"}']]).encode()],
        "safetensors": [json.dumps({"w": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}}).encode()],
        "prune": [body(ROOT.dump()), body(FORKED.dump())],
        "plan": [body(planned().dump())],
        "key": [keys.lease(1, ATTEMPT, ATTEMPT).encode(), keys.record(1, ATTEMPT).encode()],
    }
