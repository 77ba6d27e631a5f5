"""A lane of the GPU decoder on the host: it executes a plan in its order. The loops of the storage layer replace the GPU
kernels, and zlib and zstandard replace nvCOMP.
"""

from __future__ import annotations

import ctypes
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from helpers.host_encoder import weighed
from raystow.storage.coding import kernels, zstd
from raystow.storage.coding.chunk import DEFLATE
from raystow.storage.coding.derived import derive
from raystow.storage.coding.kernels import Bytes
from raystow.storage.versions.reader import PackReader, Request
from raystow.storage.versions.runs import ByteRun
from raystow.workers.gpu.decode.lane_plan import Assembly, LaneMemory, LanePlan, plan
from raystow.workers.gpu.stream_layout import compute_tables


def fill(reader: PackReader, requests: Sequence[Request]) -> list[int]:
    """Fill the targets like ``Decoder.fill``. The targets are torch tensors of words in host memory, and a lane must be able
    to decode all of them. Return the bytes of each piece in the order of completion.
    """
    others = list[ByteRun]()
    plans = list(plan(reader.runs(requests), others))
    assert not others
    return [nbytes for one in plans for nbytes in _decode(reader, one)]


def _decode(reader: PackReader, todo: LanePlan) -> list[int]:
    memory = [np.full(size + 16, 0xAB, np.uint8) for size in dataclasses.astuple(todo.needs)]
    begins = LaneMemory(*(-(-part.ctypes.data // 16) * 16 for part in memory))
    for fetch in todo.fetches:
        with fetch.needed():
            fetch.run.fetch(reader.read, at(begins.stored + fetch.start, fetch.run.length).data)
    todo.lay_out(begins)
    compute_tables(todo.streams.values())
    for (codec, length), streams in todo.streams.items():
        for source, size, target, room, _ in streams.table.T.tolist():
            if codec == DEFLATE:
                at(target, room)[:] = np.frombuffer(zlib.decompress(at(source, size).tobytes(), wbits=-15), np.uint8)
            else:
                zstd.decode(at(source, size), (size,), length, at(target, room))
    for source, target, groups in todo.unpacks:
        kernels.unpack7(at(source, 7 * groups), at(target, 8 * groups))
    sums = [_make(assembly, row) for assembly, batch in todo.in_order for row in batch.table().tolist()]
    done = list(todo.check(np.array(sums, np.uint64).view(np.int64)))
    for piece, address in todo.copies:
        words = torch.from_numpy(at(address, piece.chunk.nbytes)).view(piece.target.dtype).reshape(piece.chunk.extent)
        piece.target.copy_(words[(*piece.source, ...)])
    return done


def _make(assembly: Assembly, row: list[int]) -> int:
    """Compute the words of a row. Return the sum of their digest."""
    words, n, *planes = row
    width = assembly.width
    made: Any = at(words, n * width)
    if assembly.rounded:
        made[:] = derive(at(planes[0], 4 * n), "float32", assembly.rounded)
        return weighed(made)
    base = made.copy()
    if width == 1:
        made[:] = at(planes[0], n)
    else:
        kernels.join(tuple(at(plane, n) for plane in planes[:width]), assembly.rotated, made.view(kernels.WORDS[width]))
    if assembly.added:
        kernels.add(made.view(kernels.WORDS[width]), base.view(kernels.WORDS[width]))
    return weighed(made)


def at(address: int, nbytes: int) -> Bytes:
    """Return the memory at an address as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.empty(0, np.uint8)
