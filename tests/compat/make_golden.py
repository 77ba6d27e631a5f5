"""Script that wrote ``golden/`` and ``golden/expected.json``.

The tests do not run it: every later raystow must read the files that it wrote once.

    cd tests && python compat/make_golden.py compat/golden-v1-new      # for a new format number, into a new folder

Version 1 is the training state of one rank. Version 2 is the state of two ranks on two nodes, with every dtype. Version 3 is
encoded by this script, with features that the encoder of this raystow does not write: Deflate, other stream sizes, chunks
without some transforms, boxes that split columns.
"""

import json
import math
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
import zstandard
from blake3 import blake3

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.local_cluster import LocalCluster

from raystow.state.shards import bits
from raystow.storage.coding.chunk import Coding, packed
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.dtypes import DTYPES
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys, values
from raystow.storage.format.manifest import Chunk, Fragment, Value, path_text
from raystow.storage.format.version_record import FragmentInfo, PackInfo, VersionRecord
from raystow.storage.repository import open_repository
from raystow.storage.runtime.clock import SYSTEM

RANDOM = np.random.default_rng(1)
TRANSFORMS = {"": (False, False), "planes": (True, False), "rotl1 planes": (True, True)}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(RANDOM.normal(0, 0.02, shape).astype(np.float32)).to(dtype)


def training_state() -> dict:
    """Return plain values of every kind, and tensors whose planes the encoder stores as raw, zstd and pack7."""
    weight = normal(64, 40, dtype=torch.bfloat16)
    moment = weight.float().square().bfloat16()  # never negative: its lowest plane is even, so pack7
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": [0, 1], "amsgrad": False, "foreach": None, "empty": {}}
    return {
        "model": {
            "layers": [{"w": weight, "b": normal(40)}, {"w": normal(8, 5).T}],
            "scale": torch.tensor(2.5),
            "none": torch.empty(0, 3),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(10.0), "exp_avg": normal(64, 40), "exp_avg_sq": moment}},
            "param_groups": [group],
        },
        "data": {
            "order": np.repeat(np.arange(7, dtype=np.uint8), 20_000),
            "seed": np.int64(-7),
            "bf16": np.ones(3, ml_dtypes.bfloat16),
        },
        "plain": {
            "text": "naïve \U0001f642 \ud800",
            "bytes": bytes(range(256)),
            "big": -(3**200),
            "edge": 2**63 - 1,
            "floats": [0.1, -0.0, 5e-324, math.inf, values.decode({"float": "7ff8dead0000beef"})],
            "complex": complex(-0.0, math.nan),
            "nested": ([], (), {}),
        },
    }


def every_dtype() -> dict:
    """Return tensors of every dtype of the format, in unusual shapes, of random bits (NaNs of all kinds included)."""
    shapes = [(), (1,), (5, 1, 3), (17,), (0,), (2, 0, 3)]
    tensors = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        size = math.prod(shapes[i % 4]) * dtype.itemsize
        raw = torch.from_numpy(RANDOM.integers(0, 256, size, np.uint8))
        tensors[name] = (raw % 2 if name == "bool" else raw).view(getattr(torch, name)).reshape(shapes[i % 4])
    tensors["empty"] = {"1d": torch.empty(0), "3d": torch.empty(2, 0, 3, dtype=torch.int16)}
    even = RANDOM.integers(0, 128, 1600, np.uint8) * 2
    tensors["packed"] = {"u8": torch.from_numpy(even), "f16": normal(1001, dtype=torch.float16), "f64": normal(301).double()}
    tensors["packed"]["c64"] = torch.complex(normal(150), normal(150))
    return tensors


def planes_of(raw: np.ndarray, transform: str, width: int) -> list[np.ndarray]:
    words = raw.view(f"<u{width}")
    if "rotl1" in transform:
        words = (words << np.array(1, words.dtype)) | (words >> np.array(8 * width - 1, words.dtype))
    return list(words.view(np.uint8).reshape(-1, width).T) if transform else [raw]


def coded(plane: np.ndarray, codec: str, stream: int) -> list[bytes]:
    if codec == "raw":
        return [plane.tobytes()]
    if codec == "pack7":
        return [np.packbits(np.unpackbits(plane).reshape(-1, 8)[:, :7]).tobytes()]
    pieces = [plane[i : i + stream].tobytes() for i in range(0, plane.size, stream)]
    if codec == "zstd":
        return [zstandard.ZstdCompressor(level=3).compress(piece) for piece in pieces]
    deflaters = [zlib.compressobj(9, zlib.DEFLATED, -15) for _ in pieces]
    return [d.compress(piece) + d.flush() for d, piece in zip(deflaters, pieces, strict=True)]


class Hand:
    """Writer of one node's part of a version, chunk by chunk."""

    def __init__(self, node: int) -> None:
        self.node, self.chunks, self.pack = node, [], b""

    def add(
        self, name: str, array: np.ndarray, box: tuple, *, transform: str = "", codecs: str = "raw", stream: int = 65536
    ) -> None:
        part = np.ascontiguousarray(array[tuple(slice(o, o + e) for o, e in zip(*box, strict=True))]).reshape(-1).view(np.uint8)
        planes, names = planes_of(part, transform, array.itemsize), codecs.split()
        done = [coded(plane, codec, stream) for plane, codec in zip(planes, names, strict=True)]
        order = sorted(range(len(names)), key=lambda p: (names[p] != "raw", p))
        stored = b"".join(b"".join(done[p]) for p in order)
        streams = [len(s) for p in order if names[p] in ("zstd", "deflate") for s in done[p]]
        coding = Coding(*TRANSFORMS[transform], tuple(names), tuple(sum(map(len, d)) for d in done), packed(streams), stream)
        self.chunks.append(
            Chunk(
                name=name, path=path_text((name,)), kind="tensor", dtype=str(array.dtype), shape=array.shape, offset=box[0],
                extent=box[1], node=self.node, group="weights", pack=0, start=len(self.pack), coding=coding,
                raw_digest=raw_digest(part), stored_digest=stored_digest(stored),
            )
        )  # fmt: skip
        self.pack += stored


def by_hand() -> tuple[list[Hand], dict[str, np.ndarray]]:
    long = np.resize(np.float32([1, 2, 3, 5, 8, 13]), 70_001)
    mixed = (RANDOM.integers(0, 2**30, 1024, np.uint32) & ~np.uint32(0x100) | 0x10000).view(np.float32)
    mixed.view(np.uint32)[:] = (mixed.view(np.uint32) >> 1) | (mixed.view(np.uint32) << 31)  # undoes rotl1
    columns, table = RANDOM.normal(size=(6, 10)).astype(np.float16), np.repeat(np.arange(40, dtype=np.int32), 30)
    wide = table.astype(np.float64)
    nodes = [Hand(0), Hand(1)]
    nodes[0].add("deflate", long, ((0,), (70_001,)), transform="rotl1 planes", codecs="deflate deflate deflate deflate")
    nodes[0].add("mixed", mixed, ((0,), (1024,)), transform="rotl1 planes", codecs="deflate pack7 raw zstd")
    nodes[1].add("table", table, ((0,), (1200,)), codecs="zstd", stream=1000)
    nodes[1].add(
        "unrotated", table.astype(np.float64), ((0,), (1200,)), transform="planes", codecs=" ".join(["deflate"] * 8), stream=997
    )
    for i, box in enumerate([((0, 0), (6, 3)), ((0, 3), (2, 7)), ((2, 3), (4, 4)), ((2, 7), (4, 3))]):
        nodes[i % 2].add("columns", columns, box, transform="rotl1 planes" if i else "", codecs="zstd raw" if i else "raw")
    return nodes, {"deflate": long, "mixed": mixed, "table": table, "unrotated": wide, "columns": columns}


def commit_by_hand(uri: str, nodes: list[Hand]) -> None:
    repository = open_repository(uri)
    committer = Committer(repository, "make_golden.py")
    id, attempt = committer.reserve()
    fragments, packs = [], []
    for hand in nodes:
        repository.store.put(keys.pack(id, attempt, hand.node, "weights", 0), [hand.pack])
        packs.append(PackInfo(hand.node, "weights", 0, len(hand.pack)))
        value = Value("writer", path_text(("writer",)), values.dumps(f"node {hand.node}"), (hand.node,))
        data = Fragment(hand.node, tuple(hand.chunks), (value,)).dump()
        repository.store.put(keys.fragment(id, attempt, hand.node), [data])
        raw = sum(c.nbytes for c in hand.chunks)
        digest = stored_digest(data).hex()
        fragments.append(FragmentInfo(hand.node, len(data), digest, (hand.node,), len(hand.chunks), raw, len(hand.pack)))
    record = VersionRecord(
        repository.id, id, attempt, committer.epoch, 30, SYSTEM.now(), 2, {"by": "hand"}, {"make_golden.py": "1"},
        tuple(fragments), tuple(packs),
    )  # fmt: skip
    committer.commit(record)


def leaves(node: object, name: str = "") -> dict[str, object]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else None
    if items is None or not node:
        return {name: node}
    return {n: leaf for key, child in items for n, leaf in leaves(child, f"{name}.{key}" if name else str(key)).items()}


def expected(*states: dict) -> dict:
    """Return dtype, shape and BLAKE3 of every tensor, and the JSON text of every plain value of each rank."""
    tensors, plain = {}, [{} for _ in states]
    for rank, state in enumerate(states):
        for name, leaf in leaves(state).items():
            if isinstance(leaf, torch.Tensor):
                tensors[name] = [str(leaf.dtype)[6:], list(leaf.shape), blake3(bits(leaf).tobytes()).hexdigest()]
            elif isinstance(leaf, np.ndarray | np.generic):
                tensors[name] = [leaf.dtype.name, list(leaf.shape), blake3(leaf.tobytes()).hexdigest()]
            else:
                plain[rank][name] = values.dumps(leaf)
    return {"tensors": tensors, "values": plain}


def main(folder: str) -> None:
    first, second = training_state(), every_dtype()
    ranks = [{**second, "rank": {"id": rank, "rng": bytes([rank] * 8)}, "shared": "same"} for rank in range(2)]
    with LocalCluster(folder, nodes=2) as cluster:
        version = cluster.save(first, step=10, metrics={"loss": 2.25, "bad": math.nan})
        cluster.save_all(ranks, step=20)
    nodes, third = by_hand()
    commit_by_hand(folder, nodes)
    open_repository(folder).pin(version, "best")
    written = [{"writer": f"node {node}"} for node in range(2)]
    hand = expected(*written) | {"tensors": expected(third)["tensors"]}
    described = {"1": expected(first), "2": expected(*ranks), "3": hand}
    (Path(folder) / "expected.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
