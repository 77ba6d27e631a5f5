"""Codes chunks where they are, on the GPU, and lets them leave for host memory, in the shadow of whatever else the GPU does.

Every chunk goes through these stages, each on a stream of its own, many chunks at a time:

1. *read*: one kernel takes its words apart into planes and adds up its digest. From here on the tensor may change.
2. *leave*: planes that are not worth coding are copied to pinned host memory.
3. *code*: the exponent plane waits in device memory until that is short, or until everything has been read; then nvCOMP codes
   those of several batches in one call, since it is the faster the more streams it sees.
4. *leave*: the coded streams are packed densely, in the memory that the planes came from, and copied to the host too.

The link to the host moves a fiftieth of what the GPU's memory does: the order is made to keep the link busy, and to be through
with reading soon. Coding, which takes arithmetic away from whoever else uses the GPU, comes last where memory allows.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...storage.chunk import ANS, DEFLATE, SMALL, ZSTD
from ...storage.digest import finish
from ...storage.errors import SaveFailed
from . import kernels
from .arena import Arena
from .jobs import Batch, Coded, Group, Job, Sink, Source
from .nvcomp import STREAM, Codec

MEMORY = 1344 << 20
"""Bytes of device memory that an encoder takes by default."""

_GROUP = {DEFLATE: 96 << 20, ZSTD: 32 << 20, ANS: 64 << 20}  # plane bytes that are coded by one call
_BATCH = 128 << 20  # raw bytes that are read by one launch
_ROWS = 512  # chunks in a batch, at most
_HASTE = -5  # the highest priority


class Encoder:
    """Codes what is given to ``encode``, with ``memory`` bytes of one GPU. ``codec`` None: everything leaves as it is."""

    def __init__(self, device: torch.device, codec: str | None, sink: Sink, *, memory: int = MEMORY) -> None:
        self._device, self._sink = device, sink
        with torch.cuda.device(device):
            self._codec = Codec(codec, STREAM[codec]) if codec else None
            self._stream = STREAM[codec] if codec else 1
            self._reading, self._coding, self._leaving = (torch.cuda.Stream(device) for _ in range(3))
            self._hasty = torch.cuda.Stream(device, priority=_HASTE)
            self._streams = min(_GROUP[codec], memory // 8) // self._stream + _ROWS if codec else 0
            stride = self._codec.stride if self._codec else 0
            scratch = self._codec.coding_scratch(self._streams) if self._codec else 0
            rest = memory - self._streams * stride - scratch
            self._out = torch.empty(self._streams * stride, dtype=torch.uint8, device=device)
            self._scratch = torch.empty(scratch, dtype=torch.uint8, device=device)
            self._kept = Arena(rest * 3 // 8 if codec else rest, device)
            self._tops = Arena(rest * 5 // 8 if codec else 0, device)
        self._batch_bytes = min(_BATCH, self._kept.size // 4, sink.capacity // 8)
        self._reset()

    def _reset(self) -> None:
        self._reads: deque[Batch] = deque()
        self._waiting: deque[list[Job]] = deque()  # batches whose highest planes are to be coded
        self._group: Group | None = None
        self._leaves: deque[tuple[Any, Callable[[], None]]] = deque()
        self._all_read = False
        self._held = 0  # bytes in the sink of chunks that are not complete
        self._arrived: list[Job] = []
        self._emit: Callable[[list[Coded]], None] = lambda coded: None
        self._urgent: Callable[[], bool] = lambda: False
        self._samples: torch.Tensor | None = None

    def close(self) -> None:
        """Give the device memory back."""
        torch.cuda.synchronize(self._device)
        del self._out, self._scratch, self._kept, self._tops
        self._reset()

    def encode(
        self,
        sources: Sequence[Source],
        *,
        after: Any,
        on_read: Callable[[], None],
        emit: Callable[[list[Coded]], None],
        urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """Code all sources. ``emit`` gets what has arrived, bit by bit and in any order; ``on_read`` is called when everything
        has been read and may change. ``after``: a CUDA event before which nothing is read. ``urgent``: whether someone waits for
        the reading; from then on it goes before all else on the GPU, which has nothing better to do.

        Raises ``SaveFailed`` naming a tensor that changed too early: a sixteenth of every chunk, evenly spread, is looked at when
        the save begins, and its digest compared with that of what the chunk was taken apart from.
        """
        self._emit, self._urgent = emit, urgent
        with torch.cuda.device(self._device):
            try:
                jobs = [self._job(i, source) for i, source in enumerate(sources)]
                for stream in (self._reading, self._hasty):
                    stream.wait_event(after)
                self._take_samples(jobs)
                for batch in self._batches(jobs):
                    self._read(batch)
                    self._turn()
                while self._reads:
                    self._let_leave(self._reads.popleft())
                self._all_read = True
                on_read()
                while self._waiting or self._group or self._leaves:
                    self._wait()
                self._flush()
            except BaseException:
                torch.cuda.synchronize(self._device)
                raise
            finally:
                self._kept.clear()
                self._tops.clear()
                self._reset()

    def _turn(self) -> bool:
        """Take up whatever is done, without waiting; whether there was anything."""
        moved = False
        while self._reads and self._reads[0].read.query():
            self._let_leave(self._reads.popleft())
            moved = True
        if self._group and self._group.done.query():
            self._finish_coding(self._group)
            moved = True
        if not self._group and self._waiting and (self._all_read or self._tops.used > self._tops.size // 2):
            self._start_coding()
            moved = True
        while self._leaves and self._leaves[0][0].query():
            self._complete()
            moved = True
        return moved

    def _wait(self) -> None:
        """Let something come to its end, and use the time to hand on what has arrived."""
        if self._turn():
            return
        if self._arrived:
            self._flush()
        elif self._leaves:
            self._complete()
        elif self._reads:
            self._let_leave(self._reads.popleft())
        else:
            self._advance_coding()

    def _batches(self, jobs: list[Job]) -> Iterator[list[Job]]:
        """Chunks of one kind (all of one width; all with a plane to code, or all without) in numbers that one launch takes."""
        for _, alike in itertools.groupby(sorted(jobs, key=_kind), _kind):
            batch, size, streams = list[Job](), 0, 0
            for job in alike:
                more = job.streams if job.top >= 0 else 0
                full = size + job.nbytes > self._batch_bytes or streams + more > self._streams or len(batch) == _ROWS
                if batch and full:
                    yield batch
                    batch, size, streams = [], 0, 0
                batch.append(job)
                size += job.nbytes
                streams += more
            if batch:
                yield batch

    def _job(self, index: int, source: Source) -> Job:
        address, nbytes, dtype = source.address, source.nbytes, source.dtype
        if self._codec is None or nbytes < SMALL:
            return Job(source, index, address, nbytes, dtype, nbytes, 1)
        return Job(
            source, index, address, nbytes, dtype, nbytes // dtype.width, dtype.width, self._codec.name, self._stream, top=0
        )

    def _take_samples(self, jobs: list[Job]) -> None:
        """Look at all chunks as they are now; compared when they have been read."""
        with torch.cuda.stream(self._reading):
            samples = torch.zeros(len(jobs), dtype=torch.int64, device=self._device)
            for (scattered, width), alike in itertools.groupby(sorted(jobs, key=_lie), _lie):
                some = list(alike)
                for part in ([job] for job in some) if scattered else (some,):  # one at a time, where copies are needed
                    rows, copies = self._rows(part, width)
                    found = torch.zeros(len(part), dtype=torch.int64, device=self._device)
                    packed = kernels.can_pack(rows, width)
                    kernels.sample(self._upload(rows), _largest(rows, width), width=width, packed=packed, samples=found)
                    samples[self._upload(np.array([job.index for job in part]))] = found
                    del copies
            self._samples = torch.empty(len(jobs), dtype=torch.int64, pin_memory=True).copy_(samples, non_blocking=True)
            sampled = self._reading.record_event()
        self._hasty.wait_event(sampled)

    def _rows(self, jobs: list[Job], width: int) -> tuple[Any, list[torch.Tensor]]:
        """A kernel's table without its planes, and the copies that must live until the kernel was launched."""
        copies = [job.source.gather() for job in jobs if job.address is None]
        addresses = iter([copy.data_ptr() for copy in copies])
        rows = np.zeros((len(jobs), kernels.COLUMNS), np.int64)
        rows[:, 0] = [next(addresses) if job.address is None else job.address for job in jobs]
        rows[:, 1] = [job.nbytes // width for job in jobs]
        return rows, copies

    def _upload(self, rows: Any) -> torch.Tensor:
        """An array of int64 on the device, by way of pinned memory, on the current stream."""
        return torch.from_numpy(rows).pin_memory().to(self._device, non_blocking=True)

    def _read(self, jobs: list[Job]) -> None:
        """Launch the kernel that takes a batch apart."""
        width = jobs[0].width
        coded = jobs[0].top >= 0
        planes = sum(job.room for job in jobs)
        low = planes if width > 1 or not coded else 0
        middle = planes * max(0, width - 2)
        rotate = coded and jobs[0].dtype.rotate
        if coded:
            self._place(jobs, "top", self._take_tops(planes), 1)
        base = self._take_kept(low + middle + (low * 7 // 8 if rotate else 0))
        if low:
            self._place(jobs, "low", base, 1)
        if middle:
            self._place(jobs, "middle", base + low, width - 2)
        batch = Batch(jobs, base, low, middle)
        stream = self._hasty if self._urgent() else self._reading
        with torch.cuda.stream(stream):
            rows, batch.copies = self._rows(jobs, width)
            kept, tops = self._kept.memory.data_ptr(), self._tops.memory.data_ptr()
            for row, job in zip(rows, jobs, strict=True):
                if low:
                    row[2] = kept + job.low
                for p in range(1, width - 1):
                    row[2 + p] = kept + job.middle + (p - 1) * job.plane
                if coded:
                    row[1 + width] = tops + job.top
            results = torch.zeros((3, len(jobs)), dtype=torch.int64, device=self._device)
            packed = kernels.can_pack(rows, width)
            kernels.split(self._upload(rows), _largest(rows, width), width=width, rotate=rotate, packed=packed, results=results)
            batch.results = torch.empty(results.shape, dtype=torch.int64, pin_memory=True).copy_(results, non_blocking=True)
            batch.read = stream.record_event()
        self._reads.append(batch)

    def _place(self, jobs: list[Job], what: str, at: int, planes: int) -> None:
        for job in jobs:
            setattr(job, what, at)
            at += job.room * planes

    def _take_kept(self, nbytes: int) -> int:
        while (at := self._kept.take(nbytes)) is None:
            self._wait()
        return at

    def _take_tops(self, nbytes: int) -> int:
        while (at := self._tops.take(nbytes)) is None:
            self._wait()
        return at

    def _let_leave(self, batch: Batch) -> None:
        """When a batch has been read: compare its digests, and let the planes go that stay as they are."""
        batch.read.synchronize()
        batch.copies.clear()
        assert self._samples is not None
        digests, samples, odds = batch.results.numpy()
        first = self._samples.numpy()
        for job, digest, sample in zip(batch.jobs, digests.tolist(), samples.tolist(), strict=True):
            if sample != first[job.index]:
                raise SaveFailed(
                    "the tensor changed while it was being saved",
                    subject=job.source.name,
                    remedy="call fence() before anything changes it, or guard(optimizer)",
                )
            job.digest = finish(digest, job.nbytes)
        coded, width = batch.jobs[0].top >= 0, batch.jobs[0].width
        if coded:
            self._keep_within_sink(sum(job.plane * (width - 1) for job in batch.jobs))
        if coded and width > 1 and batch.jobs[0].dtype.rotate:
            for job, odd in zip(batch.jobs, odds.tolist(), strict=True):
                job.packed = not odd and job.plane % 8 == 0  # no word is negative: the lowest bit of all is zero
        memory, base, low, middle = self._kept.memory, batch.base, batch.low, batch.middle
        pieces: list[tuple[int, int, list[tuple[Job, str, int, int]]]] = []
        packs = []
        for packed, run in itertools.groupby(batch.jobs if low else (), lambda job: job.packed):
            jobs = list(run)
            start, size = jobs[0].low - base, sum(job.room for job in jobs)
            if packed:
                target = low + middle + start // 8 * 7
                packs.append((memory.data_ptr() + base + start, memory.data_ptr() + base + target, size // 8))
                row = [(j, "low", (j.low - base - start) // 8 * 7, j.plane // 8 * 7) for j in jobs]
                pieces.append((base + target, size // 8 * 7, row))
            else:
                pieces.append((base + start, size, [(j, "low", j.low - base - start, j.plane) for j in jobs]))
        if middle:
            row = [(j, "middle", j.middle - base - low, j.plane * (width - 2)) for j in batch.jobs]
            pieces.append((base + low, middle, row))
        ready = batch.read
        if packs:
            stream = self._hasty if self._urgent() else self._reading
            stream.wait_event(batch.read)
            with torch.cuda.stream(stream):
                kernels.pack7(self._upload(np.array(packs, np.int64)), max(pack[2] for pack in packs))
                ready = stream.record_event()
        with torch.cuda.stream(self._leaving):
            self._leaving.wait_event(ready)
            for start, size, row in pieces:
                self._write(memory[start : start + size], row)
            event = self._leaving.record_event()
        if coded:  # only now: a chunk is complete when its highest plane has left, so the others must be on their way before
            self._waiting.append(batch.jobs)

        def left() -> None:
            self._kept.give_back()
            if not coded:
                self._arrived.extend(batch.jobs)

        self._leaves.append((event, left))

    def _keep_within_sink(self, nbytes: int) -> None:
        """Chunks that are not complete cannot be handed on: they must never fill the sink, or nothing would move any more."""
        while self._held and self._held + nbytes > self._sink.capacity // 3:
            self._advance_coding() if self._waiting or self._group else self._complete()
        self._held += nbytes

    def _write(self, source: torch.Tensor, pieces: list[tuple[Job, str, int, int]]) -> None:
        """Let a run of device memory go, and note for each piece of it (job, which part, start, bytes) where it will lie."""
        parts = self._sink.write(source, [(start, nbytes) for _, _, start, nbytes in pieces], self._relieve)
        for (job, what, _, _), found in zip(pieces, parts, strict=True):
            job.parts[what] = found

    def _relieve(self) -> None:
        if self._leaves:
            self._complete()
        self._flush()

    def _advance_coding(self) -> None:
        """Start to code what waits, or take up what has been coded."""
        if self._group is None:
            self._start_coding()
        else:
            self._finish_coding(self._group)

    def _start_coding(self) -> None:
        group = Group([], 0)
        streams = 0
        while self._waiting and streams + (more := sum(job.streams for job in self._waiting[0])) <= self._streams:
            group.jobs += self._waiting.popleft()
            group.regions += 1
            streams += more
        assert self._codec is not None
        jobs = group.jobs
        counts = [job.streams for job in jobs]
        owner = np.repeat(np.arange(len(jobs)), counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        tops, planes = np.array([job.top for job in jobs]), np.array([job.plane for job in jobs])
        tables = np.empty((3, len(owner)), np.int64)
        tables[0] = self._tops.memory.data_ptr() + tops[owner] + number * self._stream
        tables[1] = np.minimum(self._stream, planes[owner] - number * self._stream)
        tables[2] = self._out.data_ptr() + np.arange(len(owner)) * self._codec.stride
        with torch.cuda.stream(self._coding):
            sources, sizes, targets = self._upload(tables)
            results = torch.empty((2, len(owner)), dtype=torch.int64, device=self._device)
            status = results[1].view(torch.int32)[: len(owner)]
            status.fill_(1)
            self._codec.compress(sources, sizes, targets, results[0], scratch=self._scratch, status=status)
            group.results = torch.empty(results.shape, dtype=torch.int64, pin_memory=True).copy_(results, non_blocking=True)
            group.done = self._coding.record_event()
        self._group = group

    def _finish_coding(self, group: Group) -> None:
        """Pack the streams densely into the memory that their planes came from, and let them leave.

        A chunk's streams begin where those of the chunk before end, which is never behind the chunk's own plane. A plane that did
        not get smaller stays where and as it is.
        """
        assert self._codec is not None
        group.done.synchronize()
        sizes, status = group.results.numpy()[0], group.results.numpy()[1].view(np.int32)[: group.results.shape[1]]
        if status.any():
            raise RuntimeError(f"nvCOMP could not code {np.count_nonzero(status)} of {len(sizes)} streams (code {status.max()})")
        pointer, stream = 0, 0
        runs: list[tuple[int, int, list[tuple[Job, str, int, int]]]] = []
        starts = np.empty(len(sizes), np.int64)
        lengths = sizes.copy()
        for job in group.jobs:
            n = job.streams
            mine = sizes[stream : stream + n]
            total = int(mine.sum())
            gains = total < job.plane
            if not runs or job.top < pointer or (not gains and job.top != pointer):
                pointer = job.top
                runs.append((pointer, pointer, []))
            if gains:
                job.sizes = mine
                starts[stream : stream + n] = pointer + np.cumsum(mine) - mine
            else:
                total = job.plane
                lengths[stream : stream + n] = 0
            first, _, pieces = runs[-1]
            pieces.append((job, "top", pointer - first, total))
            pointer += total
            runs[-1] = (first, pointer, pieces)
            stream += n
        rows = np.empty((len(sizes), 3), np.int64)
        rows[:, 0] = self._out.data_ptr() + np.arange(len(sizes)) * self._codec.stride
        rows[:, 1] = self._tops.memory.data_ptr() + starts
        rows[:, 2] = lengths
        with torch.cuda.stream(self._coding):
            kernels.move(self._upload(rows), int(lengths.max()))
            moved = self._coding.record_event()
        self._group = None
        with torch.cuda.stream(self._leaving):
            self._leaving.wait_event(moved)
            for first, end, pieces in runs:
                self._write(self._tops.memory[first:end], pieces)
            event = self._leaving.record_event()

        def left() -> None:
            for _ in range(group.regions):
                self._tops.give_back()
            self._held -= sum(job.plane * (job.width - 1) for job in group.jobs)
            self._arrived.extend(group.jobs)

        self._leaves.append((event, left))

    def _complete(self) -> None:
        """Wait for the oldest copy to the host."""
        event, left = self._leaves.popleft()
        event.synchronize()
        left()

    def _flush(self) -> None:
        """Hand on what has arrived."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._emit([job.coded() for job in arrived])


def _lie(job: Job) -> tuple[bool, int]:
    """How a chunk's words lie: scattered or not, and their width."""
    return job.address is None, job.dtype.width


def _kind(job: Job) -> tuple[int, int, bool, str]:
    """Chunks that are read together. The last part of the name puts tensors together that are never negative."""
    return (job.width, int(job.top < 0), job.dtype.rotate, job.source.name.rpartition(".")[2])


def _largest(rows: Any, width: int) -> int:
    return int(rows[:, 1].max()) * width
