"""A simulated device on which the decoder of this process runs."""

from __future__ import annotations

import contextlib
import ctypes
import types
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.replaced_parts import replace_parts

from raystow.storage.coding import zstd
from raystow.storage.coding.chunk import ZSTD
from raystow.storage.coding.digest import stored_digest
from raystow.workers.gpu.decode import decoder, lane, lane_plan
from raystow.workers.gpu.kernels import blake3_kernels
from streams.device import Device
from streams.encoder_run import KIB, streams


def numbers(address: int, n: int) -> list[int]:
    """Return int64 numbers in memory."""
    return list((ctypes.c_int64 * n).from_address(address))


@dataclass(frozen=True)
class Inflating:
    """A replacement of nvCOMP's decoders."""

    gpu: Device
    name: str
    stream: int

    def decoding_scratch(self, streams: int) -> int:
        return streams

    def decompress(self, *rows: Any, decoded: Any, scratch: Any, status: Any) -> None:
        def work() -> None:
            sources, sizes, targets, rooms = (numbers(row.data_ptr(), len(row)) for row in rows)
            for i, (source, size, target, room) in enumerate(zip(sources, sizes, targets, rooms, strict=True)):
                stored, made = ctypes.string_at(source, size), np.empty(room, np.uint8)
                if self.name == ZSTD:
                    zstd.decode(np.frombuffer(stored, np.uint8), (size,), room, made)
                else:
                    made[:] = np.frombuffer(zlib.decompress(stored, -15), np.uint8)
                ctypes.memmove(target, made.ctypes.data, room)
                ctypes.c_int64.from_address(decoded.data_ptr() + 8 * i).value = room

        self.gpu.enqueue(work)


@contextlib.contextmanager
def decoding(seed: int, module: types.ModuleType = decoder) -> Iterator[Device]:
    """Return a simulated device for the decoder of a module, whose lanes are small."""
    with streams(seed) as gpu, pytest.MonkeyPatch.context() as patch:

        def digests(table: Any, sizes: Sequence[int], found: Any, scratch: Any) -> None:
            def work() -> None:
                for i, size in enumerate(sizes):
                    address, nbytes, _, _ = numbers(table.data_ptr() + 32 * i, 4)
                    assert nbytes == size
                    ctypes.memmove(found.data_ptr() + 32 * i, stored_digest(ctypes.string_at(address, size)), 32)

            gpu.enqueue(work)

        codecs: list[tuple[object, str, object]] = [
            (blake3_kernels, "stored_digests", digests),
            (module, "Codec", lambda name, stream: Inflating(gpu, name, stream)),
        ]
        room = lane_plan.LaneMemory(stored=128 * KIB, planes=192 * KIB, aligned=96 * KIB, words=128 * KIB)
        replace_parts(patch, [*codecs, *((one, "ROOM", room) for one in (module, lane, lane_plan))])
        yield gpu
