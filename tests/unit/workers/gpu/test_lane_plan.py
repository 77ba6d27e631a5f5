"""The plan of a GPU decoder: the runs that are uploaded together, and the positions of streams."""

from __future__ import annotations

import numpy as np
import torch
from helpers.builders import coded_row

from raystow.storage.coding.chunk import Coding, Plane, packed
from raystow.storage.format.manifest import Chunk
from raystow.storage.versions.runs import ByteRun, Piece
from raystow.workers.gpu.decode import lane_plan
from raystow.workers.gpu.nvcomp import ALIGN
from raystow.workers.gpu.stream_layout import Streams, compute_tables

MIB = 1 << 20


def float_chunk(number: int, nbytes: int, stored: int) -> Chunk:
    """Return a float32 chunk with all planes encoded."""
    coding = Coding(True, True, ("deflate",) * 4, (stored // 4,) * 4, packed((1,) * (nbytes >> 14)), 1 << 14)
    return coded_row(number, "float32", nbytes // 4, coding)


def run_of(*chunks: Chunk) -> ByteRun:
    last = chunks[-1]
    pieces = tuple(Piece(one, target=torch.empty(0), direct=True) for one in chunks)
    return ByteRun("key", chunks[0].start, last.start + last.coding.size - chunks[0].start, pieces)


def test_a_run_too_large_for_a_lane_is_split() -> None:
    run = run_of(*(float_chunk(i, 16 * MIB, 2 * MIB) for i in range(8)))
    found = list(lane_plan.parts(run))
    assert all(needs is not None and needs.within(lane_plan.ROOM) for _, needs in found)
    parts = [part for part, _ in found]
    assert [piece for part in parts for piece in part.pieces] == list(run.pieces)
    assert [(part.start, part.length) for part in parts] == [
        (part.pieces[0].chunk.start, sum(piece.chunk.coding.size for piece in part.pieces)) for part in parts
    ]
    assert len(parts) < 8, "several chunks share a part"
    others = list[ByteRun]()
    plans = list(lane_plan.plan([run], others))
    assert [fetch.run for plan in plans for fetch in plan.fetches] == parts
    assert not others


def test_chunks_too_large_for_the_gpu_go_to_the_host() -> None:
    """A run that fits is not split."""
    small, huge = (
        run_of(float_chunk(0, 16 * MIB, 2 * MIB), float_chunk(1, 16 * MIB, 2 * MIB)),
        run_of(float_chunk(0, 256 * MIB, 2 * MIB)),
    )
    assert [part for part, _ in lane_plan.parts(small)] == [small]
    others = list[ByteRun]()
    (plan,) = lane_plan.plan([huge, small], others)
    assert [fetch.run for fetch in plan.fetches] == [small]
    assert others == [huge]


def test_stream_positions_are_consecutive_for_each_plane() -> None:
    random, several, wanted, end = np.random.default_rng(0), [Streams(100), Streams(7), Streams(100)], [[], [], []], 1 << 20
    for source, target, nbytes in ((1000, 50_000, 250), (7777, 60_000, 100), (9000, 70_000, 1), (12_345, 80_000, 999)):
        for streams, rows in zip(several[:2], wanted[:2], strict=True):
            length, start = streams.length, end
            sizes = random.integers(1, 90, -(-nbytes // length), np.int32)
            end += streams.add(Plane(0, "zstd", 0, int(sizes.sum()), sizes), source, start, target, nbytes)
            at = source
            for i, size in enumerate(sizes.tolist()):
                rows.append([at, size, target + length * i, min(length, nbytes - length * i), start])
                at, start = at + size, start + -(-size // ALIGN) * ALIGN
            assert start <= end
            assert end % ALIGN == 0
    compute_tables(several)
    assert [streams.table.T.tolist() for streams in several] == wanted
