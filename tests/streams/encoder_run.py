"""Sources for an encoder, and a receiver of its results, on simulated streams."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers.chunk_sources import Source
from helpers.replaced_parts import replace_parts

from raystow.storage.coding.chunk import DEFLATE
from raystow.storage.coding.digest import stored_digest
from raystow.storage.format.manifest import Chunk
from raystow.storage.versions.runs import decode
from raystow.workers.gpu.encode import device_memory, encoder, hash_plan
from raystow.workers.gpu.encode.arena import Arena
from raystow.workers.gpu.encode.encoder import Encoder
from raystow.workers.gpu.encode.pinned_ring import PinnedRing
from raystow.workers.gpu.encode.stages import Arrived
from raystow.workers.gpu.encode_request import EncodeRequest
from raystow.workers.gpu.kernel_args import Table
from raystow.workers.gpu.kernels import blake3_kernels
from raystow.workers.packing.attempt import coded_draft
from raystow.workers.shm.coded_layout import Layout
from raystow.workers.shm.ring import Ring
from streams.device import Device, device

KIB, MIB = 1 << 10, 1 << 20
HERE = torch.device("cpu")
HASHED = 8 * KIB
"""Bytes of the smallest chunk that is hashed on the device."""


@dataclass(frozen=True)
class Zlib:
    """A replacement of raystow's Deflate coder, which is slow in Triton's interpreter and has tests of its own."""

    gpu: Device
    name: str = DEFLATE
    stream: int = 16 * KIB
    stride: int = 20 * KIB

    def coding_scratch(self, streams: int) -> int:
        return streams

    def compress(
        self, sources: Table, sizes: Table, targets: Table, coded: Table, *, scratch: torch.Tensor, status: torch.Tensor
    ) -> None:
        def code() -> None:
            rows, found = zip(*(numbers_of(one).tolist() for one in (sources, sizes, targets)), strict=True), numbers_of(coded)
            for i, (source, size, target) in enumerate(rows):
                coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
                made = coder.compress(ctypes.string_at(source, size)) + coder.flush()
                ctypes.memmove(target, made, len(made))
                found[i] = len(made)

        self.gpu.enqueue(code)
        status.zero_()


class Blake3:
    """A replacement of the kernels of BLAKE3, which are slow in the interpreter: a leaf's value is its number and its bytes."""

    def __init__(self, gpu: Device) -> None:
        self._gpu, self._values = gpu, dict[int, tuple[int, bytes]]()  # by address

    def leaves(self, table: Any, largest: int, values: Any) -> None:
        def work() -> None:
            for address, size, first, before in rows_of(table):
                assert 0 < size <= min(largest, MIB), "a planted bug may give any size"
                for number, start in enumerate(range(0, size, KIB)):
                    leaf = ctypes.string_at(address + start, min(KIB, size - start))
                    self._values[values.data_ptr() + 32 * (first + number)] = before + number, leaf

        self._gpu.enqueue(work)

    def tree(self, table: Any, values: Any, others: Any, digests: Any) -> None:
        def work() -> None:
            for i, (_, size, first, _) in enumerate(rows_of(table)):
                found = [self._values.pop(values.data_ptr() + 32 * (first + n), (0, b"")) for n in range(-(-size // KIB))]
                right = [number for number, _ in found] == list(range(len(found)))
                digest = stored_digest(b"".join(leaf for _, leaf in found)) if right else b"wrong".ljust(32)
                ctypes.memmove(digests.data_ptr() + 32 * i, digest, 32)

        self._gpu.enqueue(work)


def numbers_of(table: Table, columns: int = 1) -> npt.NDArray[np.int64]:
    """The memory of a table."""
    return np.ctypeslib.as_array((ctypes.c_int64 * (columns * len(table))).from_address(table.data_ptr()))


def rows_of(table: Table) -> list[list[int]]:
    """The rows of a table of four columns."""
    rows: list[list[int]] = numbers_of(table, 4).reshape(-1, 4).tolist()
    return rows


@contextlib.contextmanager
def streams(seed: int) -> Iterator[Device]:
    """Return a simulated device whose kernels of codecs are replaced."""
    with device(seed) as made, pytest.MonkeyPatch.context() as patch:
        blake3 = Blake3(made)
        codecs: list[tuple[object, str, object]] = [
            (encoder, "coder", lambda name: Zlib(made)),
            (hash_plan, "LEAST", HASHED),
            (device_memory, "PACK_BUFFERS", 1),
            (blake3_kernels, "leaves", blake3.leaves),
            (blake3_kernels, "tree", blake3.tree),
        ]
        replace_parts(patch, codecs)
        yield made


class Receiver:
    """A ring that receives chunks, and the decoded chunks. A slot is free again as soon as its chunks are announced."""

    def __init__(self, slots: int) -> None:
        self._ring = Ring.create(slots * 64 * KIB, 64 * KIB)
        self._free = list(range(self._ring.slots))
        self._refused = 0  # times in a row that there was no free slot
        self.box = PinnedRing(self._ring, take=self._take, release=self._released)
        self.found: dict[str, bytes] = {}
        self.hashed = set[str]()
        self.chunks: dict[str, Chunk] = {}

    def _take(self) -> int | None:
        self._refused = 0 if self._free else self._refused + 1
        assert self._refused < 10_000, "no slot will be free again: with a planted bug, a copy may be larger than the ring"
        return self._free.pop() if self._free else None

    def _released(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._ring.slot(slot)[:] = 0xEE
        self._free.extend(slots)

    def emit(self, encoder: Encoder, sources: list[Source], arrived: list[Arrived]) -> None:
        assert encoder.plan is not None
        layout = Layout(encoder.plan.layout(0, sources))
        for row in (row for one in arrived for row in layout.chunks(one.message)):
            stored = np.concatenate([self._ring.slot(slot)[at : at + size] for slot, at, size in row.parts])
            chunk = coded_draft(row, 0)
            if chunk.stored_digest:
                assert chunk.stored_digest == stored_digest(stored), f"the GPU has hashed other bytes of {row}"
                self.hashed.add(chunk.name)
            self.found[chunk.name] = decode(chunk, stored)[1].tobytes()
            self.chunks[chunk.name] = chunk
        self.box.announced(run for one in arrived for run in one.runs)


def weights(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(n) * 0.02).to(dtype)


def all_sources() -> Iterator[Source]:
    torch.manual_seed(0)
    yield Source("one", weights(1))
    yield Source("small", weights(300, torch.float64))
    for i in range(3):
        yield Source(f"m{i}.master", weights(14_000 + i))
        yield Source(f"m{i}.square", weights(12_000 + 16 * i).square())
        yield Source(f"m{i}.half", weights(20_000 + 3 * i, torch.bfloat16))
    yield Source("any bits", torch.randint(-(1 << 31), 1 << 31, (9_000,)).to(torch.int32).view(torch.float32))
    yield Source("double", weights(5_000, torch.float64))
    yield Source("eight", weights(30_001).to(torch.float8_e5m2))
    yield Source("transposed", weights(6_000).reshape(60, 100).t())
    yield Source("zeros", torch.zeros(20_000))
    yield Source("rounded", weights(4_000).abs().bfloat16().float(), coded=(0, 1, 2, 3))


def small_encoder(codec: str | None, receiver: Receiver, *, of: type[Encoder] = Encoder, values: int | None = None) -> Encoder:
    """Return an encoder whose memory is smaller than its input. ``values``: bytes for the values of leaves."""
    made = of(HERE, codec, receiver.box, size=24 * MIB)
    memory = made._resources.memory
    memory.low_planes, memory.values = memory.low_planes[: 160 * KIB], memory.values[:values]
    if codec:
        memory.high_planes, memory.dense = memory.high_planes[: 64 * KIB], Arena(memory.dense.memory[: 96 * KIB])
        memory.limits = replace(memory.limits, group=64 * KIB)
    return made


def garbage(sources: list[Source]) -> None:
    """Overwrite the tensors, like a training that may change them."""
    for source in sources:
        source.tensor.view(torch.uint8 if source.tensor.is_contiguous() else source.tensor.dtype).fill_(91)


def encode(gpu: Device, encoder: Encoder, receiver: Receiver, sources: list[Source], **more: Any) -> None:
    """Encode the sources, and overwrite them as soon as they have been read."""
    emit = functools.partial(receiver.emit, encoder, sources)
    request = EncodeRequest(sources, gpu.default.record_event(), **{"on_read": lambda: garbage(sources), **more})
    encoder.encode(request, emit)
    receiver.box.end()
