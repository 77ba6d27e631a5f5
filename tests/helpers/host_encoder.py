"""The GPU encoding of chunks on the host: it places planes and reports them like the real encoder. The loops of the storage
layer replace the GPU kernels, and zlib replaces nvCOMP.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raystow.storage.coding import dtypes, kernels
from raystow.storage.coding.chunk import DEFLATE
from raystow.storage.coding.digest import BLOCK, WORD_KEYS, block_key
from raystow.storage.coding.kernels import Bytes
from raystow.workers.gpu.encode.encode_plan import Batch, EncodePlan, Group, Limits
from raystow.workers.gpu.encode.jobs import Job
from raystow.workers.gpu.encode.pinned_ring import PinnedRing, RingRun
from raystow.workers.gpu.encode_request import DeviceSource
from raystow.workers.protocol.messages import BatchBytes, ChunkInfo, CodedBatches, CodedPlanes


@dataclass(frozen=True)
class HostSource(DeviceSource):
    """A chunk in host memory. A ``scattered`` chunk has no address."""

    name: str
    dtype: dtypes.DType
    raw: Bytes
    scattered: bool = False
    identity: Any = None
    high: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.raw.size

    @property
    def address(self) -> int | None:
        return None if self.scattered else self.raw.ctypes.data

    @property
    def planes(self) -> tuple[int, ...]:
        return self.high or (self.dtype.width - 1,)

    def gather(self, uploaded: torch.Tensor | None = None) -> torch.Tensor:
        return torch.from_numpy(self.raw)

    def describe(self) -> ChunkInfo:
        shape = (self.nbytes // self.dtype.itemsize,)
        return ChunkInfo(self.name, "[]", "tensor", self.dtype.name, shape, "weights", (0,), shape)


@dataclass(frozen=True)
class Places:
    """The content of a batch message except the digests: see ``messages.BatchBytes``."""

    runs: list[RingRun] = field(default_factory=list)
    lows: list[tuple[int, int, bool]] = field(default_factory=list)


class HostEncoder:
    """Encodes chunks on the host. ``pack_limit``: bytes for the packed planes of a batch, or None to pack no planes. ``packed``:
    names of the packed chunks.
    """

    def __init__(self, sources: list[HostSource], limits: Limits, ring: PinnedRing, *, pack_limit: int | None) -> None:
        most = max([limits.batch, *(source.nbytes for source in sources)])
        sizes = most + 8 * 16 * len(sources) + 512, 3 * limits.streams * limits.stream
        self._memory = [np.zeros(size, np.uint8) for size in sizes]
        low, high = map(torch.from_numpy, self._memory)
        self.plan = EncodePlan(sources, limits, low_planes=low, high_planes=high)
        self.packed: set[str] = set()
        self._sources, self._ring, self._pack_limit = sources, ring, pack_limit

    def messages(self) -> Iterator[CodedBatches]:
        """Yield the messages for all chunks, batch by batch and group by group."""
        numbered = enumerate(self.plan.batches)
        for group, batches in itertools.groupby(numbered, lambda at: at[1].group if at[1].group >= 0 else ~at[0]):
            read = tuple(self._read(number, batch) for number, batch in batches)
            yield CodedBatches(read, self._code(self.plan.groups[group]) if group >= 0 else None)

    def _at(self, address: int, nbytes: int) -> Bytes:
        (memory,) = (m for m in self._memory if 0 <= address - m.ctypes.data <= m.size - nbytes)
        start = address - memory.ctypes.data
        return memory[start : start + nbytes]

    def _write(self, run: Bytes) -> RingRun:
        return self._ring.write(run.ctypes.data, run.nbytes, lambda: None)

    def _read(self, number: int, batch: Batch) -> BatchBytes:
        jobs, sums, places = self.plan.jobs[batch.first : batch.last], list[int](), Places()
        for job, row in zip(jobs, self.plan.table[batch.first : batch.last].tolist(), strict=True):
            raw = self._sources[job.index].raw
            sums.append(weighed(raw))
            planes = tuple(self._at(address, job.plane) for address in row[2 : 2 + job.width])
            if job.width > 1:
                kernels.split(raw.view(kernels.WORDS[job.width]), batch.rotate, planes)
            else:
                planes[0][:] = raw
        if batch.rotate and batch.low and self._pack_limit is not None:
            self._write_packed(batch, jobs, places, self._pack_limit)
        elif batch.low + batch.middle:
            places.runs.append(self._write(self._at(batch.base, batch.low + batch.middle)))
        return BatchBytes(number, np.array(sums, "<u8").tobytes(), tuple(places.runs), tuple(places.lows))

    def _write_packed(self, batch: Batch, jobs: list[Job], places: Places, pack_limit: int) -> None:
        """Write the middle planes, then the packed planes, then each run of lowest planes that are not packed."""
        pack_buffers, used, packed_at = np.zeros(pack_limit, np.uint8), 0, list[int | None]()
        starts = self.plan.starts[batch.first : batch.last].tolist()
        for job, start in zip(jobs, starts, strict=True):
            plane, size = self._at(batch.base + start, job.plane), job.plane // 8 * 7
            if np.bitwise_or.reduce(plane) & 1 or job.plane % 8 or used + size > pack_limit:
                packed_at.append(None)
                continue
            kernels.pack7(plane, pack_buffers[used : used + size])
            self.packed.add(job.name)
            packed_at.append(used)
            used = -(-(used + size) // 16) * 16
        if batch.middle:
            places.runs.append(self._write(self._at(batch.base + batch.low, batch.middle)))
        if used:
            places.runs.append(self._write(pack_buffers[:used]))
        packed = len(places.runs) - 1
        for alone, some in itertools.groupby(zip(jobs, starts, packed_at, strict=True), lambda row: row[2] is None):
            rows = list(some)
            if alone:
                first, end = rows[0][1], rows[-1][1] + rows[-1][0].padded
                places.lows.extend((len(places.runs), start - first, False) for _, start, _ in rows)
                places.runs.append(self._write(self._at(batch.base + first, end - first)))
            else:
                places.lows.extend((packed, at, True) for _, _, at in rows if at is not None)

    def _code(self, group: Group) -> CodedPlanes:
        """Return the streams of all encoded planes in order. A plane is stored as it is if its streams are not smaller."""
        plain = [self._at(*cut).tobytes() for cut in self.plan.cuts[:, group.streams].T.tolist()]
        dense = list[bytes]()
        for (first, plane), (last, _) in itertools.pairwise(group.owners.tolist()):
            coded = [deflated(stream) for stream in plain[first:last]]
            dense += coded if sum(map(len, coded)) < plane else plain[first:last]
        run = self._write(np.array(bytearray(b"".join(dense))))
        return CodedPlanes(run, np.array([len(stream) for stream in dense], "<i4").tobytes(), DEFLATE)


def deflated(stream: bytes) -> bytes:
    """Return the stream in raw deflate format, without a header."""
    coder = zlib.compressobj(wbits=-15)
    return coder.compress(stream) + coder.flush()


def weighed(raw: Bytes) -> int:
    """Return the sum that ``raw_digest`` computes."""
    words = np.append(raw, np.zeros(-raw.size % 4, np.uint8)).view(np.uint32)
    sums = np.zeros(-(-words.size // BLOCK), np.uint64)
    kernels.weighted_sums(words, WORD_KEYS, sums)
    return sum(int(s) * block_key(b) for b, s in enumerate(sums)) % 2**64
