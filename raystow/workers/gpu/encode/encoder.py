"""Codes chunks where they are, on the GPU, and lets them leave for host memory, in the shadow of whatever else the GPU does.

Every chunk goes through these stages, each on a stream of its own, many chunks at a time:

1. *read*: one kernel takes its words apart into planes and adds up its digest. From here on the tensor may change.
2. *leave*: planes that are not worth coding are copied to pinned host memory.
3. *code*: the others are coded, of most chunks the highest alone, of several batches in one call, since coders are the faster the
   more streams they see. Coded streams are put together densely, and wait in device memory until everything has been read: the
   link to the host moves a fiftieth of what the GPU's memory does, so what need not leave before ``fence`` returns does not.
4. *leave*: they are copied to the host too.

What is to be done depends on where the chunks lie, not on what is in them: it is worked out once (``program``). Nor is anything
said of what has arrived before all has been read. The training waits for this thread, and shares an interpreter with it.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ....storage.errors import SaveFailed
from ...protocol.messages import CodedBatches, CodedPlanes
from ..kernels import copy_kernels, word_kernels
from ..kernels.deflate_kernels import coder
from ..nvcomp import STREAM
from .batch_results import Found
from .device_memory import SIZE, EncoderMemory
from .encode_plan import Batch, Program
from .jobs import Sink, Source
from .pack7 import worth_packing
from .stages import Arrived, CodedGroup, ReadBatch

_ALIKE = attrgetter("scattered", "width", "packed")  # batches of which samples are taken together
_SOON, _HASTE = -1, -5  # priorities: reading frees the training, coding may come later; the highest there is


class Encoder:
    """Codes what is given to ``encode``, with ``size`` bytes of one GPU. ``codec`` None: everything leaves as it is."""

    def __init__(self, device: torch.device, codec: str | None, sink: Sink, *, size: int = SIZE) -> None:
        self._device, self._sink = device, sink
        with torch.cuda.device(device):
            self._reading, self._packing = (torch.cuda.Stream(device, priority=_SOON) for _ in range(2))
            self._hasty = torch.cuda.Stream(device, priority=_HASTE)
            self._coding_stream, self._leaving = (torch.cuda.Stream(device) for _ in range(2))
            self._codec = coder(codec, STREAM[codec]) if codec else None
            self._memory = EncoderMemory(device, self._codec, size, sink.capacity)
            stride, streams = self._codec.stride if self._codec else 0, self._memory.limits.streams
            self._targets = self._memory.out.data_ptr() + torch.arange(streams, device=device) * stride
            self._sizes = torch.empty(streams, dtype=torch.int64, device=device)
            torch.cuda.current_stream(device).synchronize()
        self._program: Program | None = None
        self.sums = np.empty(0, np.uint64)
        """The digests, before ``finish``, of the chunks that were given last, in their order."""
        self._reset()

    def _reset(self) -> None:
        groups = len(self._program.groups) if self._program else 0
        self._reads: deque[ReadBatch] = deque()
        self._coding: CodedGroup | None = None
        self._coded: deque[CodedGroup] = deque()  # and not on their way yet
        self._leaves: deque[tuple[Any, Callable[[], None]]] = deque()
        self._left: list[Any] = []  # for each batch that is on its way, when it has left
        self._done: list[Any] = []  # for each group whose coding has begun, when that is done
        self._batches_of: list[list[ReadBatch]] = [[] for _ in range(groups)]  # of each group, which have been read
        self._complete_groups = 0  # that have arrived
        self._all_read = False
        self._arrived: list[Arrived] = []
        self._memory.pack_buffers.reset()
        self._sources: Sequence[Source] = ()
        self._emit: Callable[[list[Arrived]], None] = lambda coded: None
        self._urgent: Callable[[], bool] = lambda: False
        self._samples: Any = None
        self._found: Found | None = None

    @property
    def program(self) -> Program | None:
        """What is done with the chunks that were given last."""
        return self._program

    @property
    def found(self) -> Found:
        """What is found of them, until ``encode`` returns."""
        assert self._found is not None
        return self._found

    def close(self) -> None:
        """Give the device memory back."""
        torch.cuda.synchronize(self._device)
        self._program = None
        self._reset()
        del self._memory, self._targets, self._sizes

    def encode(
        self,
        sources: Sequence[Source],
        *,
        after: Any,
        on_read: Callable[[], None],
        emit: Callable[[list[Arrived]], None],
        urgent: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Code all sources. ``emit`` gets what has arrived, bit by bit and in any order; ``on_read`` is called when everything
        has been read and may change. ``after``: a CUDA event before which nothing is read. ``urgent``: whether someone waits for
        the reading; from then on it goes before all else on the GPU, which has nothing better to do. ``meanwhile`` is called
        once, when the link has as much to do as fits into device memory.

        Raises ``SaveFailed`` naming a tensor that changed too early: a sixteenth of every chunk, evenly spread, is looked at when
        the save begins and when the chunk is taken apart.
        """
        with torch.cuda.device(self._device):
            try:
                program = self._prepare(sources)
                self._sources, self._emit, self._urgent = sources, emit, urgent
                for stream in (self._reading, self._hasty):
                    stream.wait_event(after)
                self._take_samples(program)
                for number, batch in enumerate(program.batches):
                    if number == program.full:
                        meanwhile()
                    self._read(program, number, batch)
                    self._turn()
                if program.full == len(program.batches):
                    meanwhile()
                for reading in self._reads:
                    reading.read.synchronize()
                self._all_read = True
                on_read()
                while self._reads or self._complete_groups < len(program.groups) or self._leaves:
                    self._wait()
                self._flush()
                self.sums = self.found.digests(program)
            except BaseException:
                torch.cuda.synchronize(self._device)
                raise
            finally:
                self._memory.dense.clear()
                self._reset()

    def _prepare(self, sources: Sequence[Source]) -> Program:
        """The program for these chunks: the last one, if they lie where those did."""
        if self._program is None or not self._program.fits(sources):
            self._program = None
            self._program = Program(sources, self._memory.limits, kept=self._memory.kept, tops=self._memory.tops)
            torch.cuda.current_stream(self._device).synchronize()  # its tables are on the device
        self._reset()
        return self._program

    def _take_samples(self, program: Program) -> None:
        """Look at all chunks as they are now; compared when they have been read."""
        n = len(program.jobs)
        with torch.cuda.stream(self._reading):
            samples = torch.zeros(n, dtype=torch.int64, device=self._device)
            for (scattered, width, packed), alike in itertools.groupby(program.batches, _ALIKE):
                batches = list(alike)
                first, last = batches[0].first, batches[-1].last
                if not scattered:
                    table, largest = program.chunks[first:last], max(batch.largest for batch in batches)
                    word_kernels.sample(table, largest, width=width, packed=packed, samples=samples[first:last])
                    continue
                for i in range(first, last):  # one at a time: each takes a copy
                    job = program.jobs[i]
                    table, copies = self._gathered(program, i, i + 1)
                    word_kernels.sample(table, job.nbytes, width=job.width, packed=False, samples=samples[i : i + 1])
                    del copies
            self._samples = self._tell(samples)
            self._found = Found(self._sources, self._device)
            sampled = self._reading.record_event()
        self._hasty.wait_event(sampled)

    def _gathered(self, program: Program, first: int, last: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The kernels' table of scattered chunks, and copies of these, which must live until the kernel was launched."""
        copies = [self._sources[job.index].gather() for job in program.jobs[first:last]]
        rows = program.table[first:last].copy()
        rows[:, 0] = [copy.data_ptr() for copy in copies]
        return self._upload(rows), copies

    def _upload(self, rows: Any) -> torch.Tensor:
        """An array of int64 on the device, by way of pinned memory, on the current stream."""
        return torch.from_numpy(rows).pin_memory().to(self._device, non_blocking=True)

    def _tell(self, found: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, there when the current stream is through."""
        told = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
        copy_kernels.tell(found, told)
        return told

    def _turn(self) -> bool:
        """Take up whatever is done, without waiting; whether there was anything."""
        moved = False
        while self._reads and self._reads[0].read.query():
            self._let_leave(self._reads.popleft())
            moved = True
        if self._coding and self._coding.coded.query():
            self._finish_coding()
            moved = True
        if self._can_code():
            if self._code():
                moved = True
            elif self._coded:
                self._let_coded_leave()
                moved = True
        while self._leaves and self._leaves[0][0].query():
            self._complete()
            moved = True
        if self._coded and (self._all_read or not self._leaves):
            self._let_coded_leave()
            moved = True
        return moved

    def _wait(self) -> None:
        """Let something come to its end, and use the time to hand on what has arrived."""
        if self._turn():
            return
        if self._arrived and self._all_read:  # before, it would only keep the reading waiting
            self._flush()
        elif self._leaves:
            self._complete()
        elif self._reads:
            self._let_leave(self._reads.popleft())
        else:
            self._finish_coding()

    def _read(self, program: Program, number: int, batch: Batch) -> None:
        """Launch the kernel that takes a batch apart, when the memory for its planes will be free."""
        while len(self._left) < batch.after or len(self._done) < batch.after_group:
            self._wait()
        stream = self._hasty if self._urgent() else self._reading
        if batch.after:
            stream.wait_event(self._left[batch.after - 1])
        if batch.after_group:
            stream.wait_event(self._done[batch.after_group - 1])
        with torch.cuda.stream(stream):
            table, copies = program.chunks[batch.first : batch.last], list[torch.Tensor]()
            if batch.scattered:
                table, copies = self._gathered(program, batch.first, batch.last)
            how = functools.partial(word_kernels.split, width=batch.width, rotate=batch.rotate, packed=batch.packed)
            how(table, batch.largest, followed=batch.followed, results=self.found.on_device(batch))
            told = self.found.tell(batch)
            self._reads.append(ReadBatch(number, batch, stream.record_event(), told, copies))

    def _let_leave(self, read: ReadBatch) -> None:
        """When a batch has been read: compare its digests, and let the planes go that stay as they are."""
        read.read.synchronize()
        read.copies.clear()
        batch, program = read.batch, self._program
        assert program is not None
        _, samples, odds = read.found[:3].numpy()
        changed = np.flatnonzero(samples != self._samples.numpy()[batch.first : batch.last])
        if len(changed):
            raise SaveFailed(
                "the tensor changed while it was being saved",
                subject=program.jobs[batch.first + changed[0]].name,
                remedy="call fence() before anything changes it, or guard(optimizer)",
            )
        self._keep_within_sink(batch)
        with torch.cuda.stream(self._leaving):
            if batch.rotate and worth_packing(program.jobs[batch.first : batch.last], batch.low, odds):
                self._write_packed(read, odds.tolist())
            elif batch.low + batch.middle:
                self._leaving.wait_event(read.read)
                at = batch.base - self._memory.kept.data_ptr()
                read.runs.append(self._sink.write(self._memory.kept[at : at + batch.low + batch.middle], self._relieve))
            event = self._leaving.record_event()
        self._left.append(event)
        if batch.group >= 0:
            self._batches_of[batch.group].append(read)

        def left() -> None:
            if batch.group < 0:
                self._arrived.append(Arrived(read.runs, CodedBatches((read.places(),))))

        self._leaves.append((event, left))

    def _write_packed(self, read: ReadBatch, odds: list[int]) -> None:
        """Let a batch go of which some lowest planes can be packed, by run."""
        batch, program = read.batch, self._program
        assert program is not None
        jobs, starts = program.jobs[batch.first : batch.last], program.starts[batch.first : batch.last].tolist()
        kept, pack_buffers, packed = self._memory.kept, self._memory.pack_buffers, None
        base = batch.base - kept.data_ptr()
        packing = pack_buffers.plan(jobs, starts, odds, batch.base)
        if packing.rows:
            stream = self._hasty if self._urgent() else self._packing
            stream.wait_event(read.read)
            packed = pack_buffers.pack(packing, stream)
        self._leaving.wait_event(read.read)
        if batch.middle:
            between = kept[base + batch.low : base + batch.low + batch.middle]
            read.runs.append(self._sink.write(between, self._relieve))
        if packed is not None:
            self._leaving.wait_event(packed)
            at = len(read.runs)
            read.runs.append(self._sink.write(pack_buffers.room[: packing.used], self._relieve))
            pack_buffers.leaves(self._leaving.record_event())
        for alone, some in itertools.groupby(zip(jobs, starts, packing.places, strict=True), lambda row: row[2] is None):
            row = list(some)
            if alone:
                first, end = row[0][1], row[-1][1] + row[-1][0].room
                read.lows += [(len(read.runs), start - first, False) for _, start, _ in row]
                read.runs.append(self._sink.write(kept[base + first : base + end], self._relieve))
            else:
                read.lows += [(at, place, True) for _, _, place in row if place is not None]

    def _keep_within_sink(self, batch: Batch) -> None:
        """Chunks that are not complete cannot be handed on: they must never fill the sink, or nothing would move any more. There
        must always be room for all the coded planes that they wait for."""
        need = batch.low + batch.middle + self._memory.tops.numel() + self._memory.dense.size
        while self._complete_groups < batch.group and self._sink.held + need > self._sink.capacity:
            if self._coded:
                self._let_coded_leave()
            elif self._coding:
                self._finish_coding()
            elif not (self._can_code() and self._code()):
                self._complete()
            self._flush()

    def _relieve(self) -> None:
        if self._leaves:
            self._complete()
        self._flush()

    def _can_code(self) -> bool:
        """Whether the next group has been read."""
        assert self._program is not None
        groups, number = self._program.groups, len(self._done)
        return self._coding is None and number < len(groups) and len(self._batches_of[number]) == groups[number].batches

    def _code(self) -> bool:
        """Code the next group, and put what comes of it together densely; False if there is no room for that now."""
        assert self._codec is not None
        assert self._program is not None
        number = len(self._done)
        group = self._program.groups[number]
        start = self._memory.dense.take(group.nbytes)
        if start is None:
            return False
        cuts = self._program.cuts[:, group.streams]
        n = cuts.shape[1]
        with torch.cuda.stream(self._coding_stream):
            results = torch.ones((2, n), dtype=torch.int64, device=self._device)
            sizes, status = self._sizes[:n], results[1].view(torch.int32)[:n]
            self._codec.compress(cuts[0], cuts[1], self._targets[:n], sizes, scratch=self._memory.scratch, status=status)
            base = self._memory.dense.memory.data_ptr() + start
            streams = copy_kernels.CodedStreams(self._memory.out, self._codec.stride, sizes)
            copy_kernels.condense(group.owners, cuts, streams, base, largest=group.largest, lengths=results[0])
            found = self._tell(results)
            event = self._coding_stream.record_event()
        self._done.append(event)
        self._coding = CodedGroup(group, self._batches_of[number], start, found, event)
        return True

    def _finish_coding(self) -> None:
        """When a group has been coded: give back what it did not need."""
        coding, self._coding = self._coding, None
        assert coding is not None
        coding.coded.synchronize()
        lengths, status = coding.results.numpy()[0], coding.results.numpy()[1].view(np.int32)[: coding.results.shape[1]]
        if status.any():
            raise RuntimeError(
                f"nvCOMP could not code {np.count_nonzero(status)} of {len(lengths)} streams (code {status.max()})"
            )
        coding.size = int(lengths.sum())
        self._memory.dense.shrink(coding.size)
        self._coded.append(coding)

    def _let_coded_leave(self) -> None:
        """Let the oldest coded group go."""
        coding = self._coded.popleft()
        with torch.cuda.stream(self._leaving):
            run = self._memory.dense.memory[coding.start : coding.start + coding.size]
            coding.run = self._sink.write(run, self._relieve)
            event = self._leaving.record_event()

        def left() -> None:
            assert self._codec is not None
            self._memory.dense.give_back()
            self._complete_groups += 1
            lengths = coding.results[0].numpy().astype("<i4").tobytes()
            planes = CodedPlanes(tuple(coding.run.spans), lengths, self._codec.name)
            message = CodedBatches(tuple(read.places() for read in coding.batches), planes)
            self._arrived.append(Arrived([coding.run, *(run for read in coding.batches for run in read.runs)], message))

        self._leaves.append((event, left))

    def _complete(self) -> None:
        """Wait for the oldest copy to the host."""
        event, left = self._leaves.popleft()
        event.synchronize()
        left()

    def _flush(self) -> None:
        """Hand on what has arrived."""
        arrived, self._arrived = self._arrived, []
        if arrived:
            self._emit(arrived)
