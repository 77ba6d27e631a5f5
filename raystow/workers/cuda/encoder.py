"""Codes chunks where they are, on the GPU, and lets them leave for host memory, in the shadow of whatever else the GPU does.

Every chunk goes through these stages, each on a stream of its own, many chunks at a time:

1. *read*: one kernel takes its words apart into planes and adds up its digest. From here on the tensor may change.
2. *leave*: planes that are not worth coding are copied to pinned host memory.
3. *code*: nvCOMP codes the highest planes of several batches in one call, since it is the faster the more streams it sees.
4. *pack*: coded streams are put together densely, and wait in device memory until everything has been read: the link to the host
   moves a fiftieth of what the GPU's memory does, so what need not leave before ``fence`` returns does not.
5. *leave*: they are copied to the host too.

What is to be done depends on where the chunks lie, not on what is in them: it is worked out once (``program``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...storage.chunk import ANS, DEFLATE, ZSTD
from ...storage.digest import finish
from ...storage.errors import SaveFailed
from . import kernels
from .arena import Arena
from .jobs import Coded, Passage, Sink, Source
from .nvcomp import STREAM, Codec
from .program import Batch, Group, Limits, Program, key

MEMORY = 1344 << 20
"""Bytes of device memory that an encoder takes by default."""

_GROUP = {DEFLATE: 64 << 20, ZSTD: 32 << 20, ANS: 64 << 20}  # plane bytes that are coded by one call
_BATCH, _PLANE = 128 << 20, 32 << 20  # raw bytes that are read by one launch, and bytes of each of their planes
_LAP = 2  # groups that are being coded, and batches whose sevens are being packed, at a time
_SOON, _HASTE = -1, -5  # priorities: reading and packing free memory, coding may come later; the highest there is

Pieces = list[tuple[Passage, str, int, int]]
"""Of a run of device memory: a chunk, which part of it, start in the run, bytes."""


@dataclass
class _Reading:
    """A batch that is being read."""

    batch: Batch
    done: Any
    copies: list[torch.Tensor]


@dataclass
class _Coding:
    """A group that is being coded."""

    number: int
    group: Group
    results: torch.Tensor
    done: Any


@dataclass
class _Packed:
    """The coded streams of a group, which lie densely in device memory at ``start`` and may leave when they are ``there``."""

    start: int
    size: int
    pieces: Pieces
    there: Any


class Encoder:
    """Codes what is given to ``encode``, with ``memory`` bytes of one GPU. ``codec`` None: everything leaves as it is."""

    def __init__(self, device: torch.device, codec: str | None, sink: Sink, *, memory: int = MEMORY) -> None:
        self._device, self._sink = device, sink
        with torch.cuda.device(device):
            self._reading, self._packing = (torch.cuda.Stream(device, priority=_SOON) for _ in range(2))
            self._coding_stream, self._leaving = (torch.cuda.Stream(device) for _ in range(2))
            self._hasty = torch.cuda.Stream(device, priority=_HASTE)
            self._codec = Codec(codec, STREAM[codec]) if codec else None
            stream = streams = out = scratch = tops = sevens = 0
            batch = min(_BATCH, memory // 10, sink.capacity // 8)
            if self._codec:
                stream = self._codec.stream
                streams = min(_GROUP[self._codec.name], memory // 16) // stream
                streams += max(64, streams // 8)  # of many small chunks
                out, scratch = streams * self._codec.stride, self._codec.coding_scratch(streams)
                tops, sevens = 3 * streams * stream, _PLANE // 8 * 7 + (1 << 20)
            self._limits = Limits(batch, _PLANE, max(batch, sink.capacity // 4), streams, stream)
            rest = memory - tops - scratch - _LAP * (out + sevens)
            self._scratch, self._tops = self._room(scratch), self._room(tops)
            self._outs, self._sevens = ([self._room(size) for _ in range(_LAP)] for size in (out, sevens))
            stride = self._codec.stride if self._codec else 1
            self._targets = [out.data_ptr() + torch.arange(streams, device=device) * stride for out in self._outs]
            torch.cuda.current_stream(device).synchronize()
            self._packed = Arena(rest * 2 // 5 if codec else 0, device)
            self._kept = self._room(rest - self._packed.size)
        self._program: Program | None = None
        self._reset()

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _reset(self) -> None:
        self._reads: deque[_Reading] = deque()
        self._codings: deque[_Coding] = deque()
        self._there: deque[_Packed] = deque()  # packed, and not on their way yet
        self._leaves: deque[tuple[Any, Callable[[], None]]] = deque()
        self._left: list[Any] = []  # for each batch that is on its way, when it has left
        self._moved: list[Any] = []  # for each group that is packed, when that is done
        self._seven_left: list[Any] = [None] * _LAP
        self._seven = 0
        self._passages: dict[int, Passage] = {}  # by number of the job: chunks that have been read, and not arrived
        self._read_of = [0] * (len(self._program.groups) if self._program else 0)  # batches of each group that have been read
        self._begun = self._complete_groups = 0  # groups whose coding has begun; that have arrived
        self._all_read = False
        self._arrived: list[Passage] = []
        self._sources: Sequence[Source] = ()
        self._emit: Callable[[list[Coded]], None] = lambda coded: None
        self._urgent: Callable[[], bool] = lambda: False
        self._samples: Any = None
        self._results: Any = None
        self._found: Any = None

    def close(self) -> None:
        """Give the device memory back."""
        torch.cuda.synchronize(self._device)
        del self._scratch, self._tops, self._outs, self._sevens, self._packed, self._kept
        self._program = None
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
        with torch.cuda.device(self._device):
            try:
                program = self._prepare(sources)
                self._sources, self._emit, self._urgent = sources, emit, urgent
                for stream in (self._reading, self._hasty):
                    stream.wait_event(after)
                self._take_samples(program)
                for batch in program.batches:
                    self._read(program, batch)
                    self._turn()
                for reading in self._reads:
                    reading.done.synchronize()
                self._all_read = True
                on_read()
                while self._reads or self._complete_groups < len(program.groups) or self._leaves:
                    self._wait()
                self._flush()
            except BaseException:
                torch.cuda.synchronize(self._device)
                raise
            finally:
                self._packed.clear()
                self._reset()

    def _prepare(self, sources: Sequence[Source]) -> Program:
        """The program for these chunks: the last one, if they lie where those did."""
        if self._program is None or self._program.key != key(sources):
            self._program = None
            with torch.cuda.stream(self._reading):
                self._program = Program(sources, self._limits, kept=self._kept, tops=self._tops)
            self._hasty.wait_stream(self._reading)
            self._coding_stream.wait_stream(self._reading)
        self._reset()
        return self._program

    def _take_samples(self, program: Program) -> None:
        """Look at all chunks as they are now; compared when they have been read."""
        n = len(program.jobs)
        with torch.cuda.stream(self._reading):
            samples = torch.zeros(n, dtype=torch.int64, device=self._device)
            self._results = torch.zeros(3 * n, dtype=torch.int64, device=self._device)
            for (scattered, width, packed), alike in itertools.groupby(program.batches, _sampled_alike):
                batches = list(alike)
                first, last = batches[0].first, batches[-1].last
                if not scattered:
                    table, largest = program.chunks[first:last], max(batch.largest for batch in batches)
                    kernels.sample(table, largest, width=width, packed=packed, samples=samples[first:last])
                    continue
                for i in range(first, last):  # one at a time: each takes a copy
                    job = program.jobs[i]
                    table, copies = self._gathered(program, i, i + 1)
                    kernels.sample(table, job.nbytes, width=job.width, packed=False, samples=samples[i : i + 1])
                    del copies
            self._samples = torch.empty(n, dtype=torch.int64, pin_memory=True).copy_(samples, non_blocking=True)
            self._found = torch.empty(3 * n, dtype=torch.int64, pin_memory=True)
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

    def _turn(self) -> bool:
        """Take up whatever is done, without waiting; whether there was anything."""
        moved = False
        while self._reads and self._reads[0].done.query():
            self._let_leave(self._reads.popleft())
            moved = True
        if self._codings and self._codings[0].done.query():
            self._pack(self._codings.popleft())
            moved = True
        if self._can_code():
            self._code()
            moved = True
        while self._leaves and self._leaves[0][0].query():
            self._complete()
            moved = True
        if self._there and (self._all_read or not self._leaves):
            self._let_packed_leave()
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
            self._pack(self._codings.popleft())

    def _read(self, program: Program, batch: Batch) -> None:
        """Launch the kernel that takes a batch apart, when the memory for its planes will be free."""
        while len(self._left) < batch.after or len(self._moved) < batch.after_group:
            self._wait()
        stream = self._hasty if self._urgent() else self._reading
        if batch.after:
            stream.wait_event(self._left[batch.after - 1])
        if batch.after_group:
            stream.wait_event(self._moved[batch.after_group - 1])
        some = slice(3 * batch.first, 3 * batch.last)
        with torch.cuda.stream(stream):
            table, copies = program.chunks[batch.first : batch.last], list[torch.Tensor]()
            if batch.scattered:
                table, copies = self._gathered(program, batch.first, batch.last)
            results = self._results[some].view(3, -1)
            kernels.split(table, batch.largest, width=batch.width, rotate=batch.rotate, packed=batch.packed, results=results)
            self._found[some].copy_(self._results[some], non_blocking=True)
            self._reads.append(_Reading(batch, stream.record_event(), copies))

    def _let_leave(self, reading: _Reading) -> None:
        """When a batch has been read: compare its digests, and let the planes go that stay as they are."""
        reading.done.synchronize()
        program, batch = self._program, reading.batch
        assert program is not None
        reading.copies.clear()
        digests, samples, odds = self._found[3 * batch.first : 3 * batch.last].view(3, -1).numpy()
        jobs = program.jobs[batch.first : batch.last]
        changed = np.flatnonzero(samples != self._samples[batch.first : batch.last].numpy())
        if len(changed):
            raise SaveFailed(
                "the tensor changed while it was being saved",
                subject=jobs[changed[0]].name,
                remedy="call fence() before anything changes it, or guard(optimizer)",
            )
        passages = [
            Passage(job, self._sources[job.index], finish(digest, job.nbytes))
            for job, digest in zip(jobs, digests.tolist(), strict=True)
        ]
        if batch.rotate:
            for passage, odd in zip(passages, odds.tolist(), strict=True):
                passage.packed = not odd and passage.job.plane % 8 == 0  # no word is negative: the lowest bit of all is zero
        self._keep_within_sink(batch)
        runs, ready = self._runs(batch, passages, reading.done)
        with torch.cuda.stream(self._leaving):
            self._leaving.wait_event(ready)
            for run, pieces in runs:
                self._write(run, pieces)
            event = self._leaving.record_event()
        self._left.append(event)
        if any(passage.packed for passage in passages):
            self._seven_left[self._seven] = event
            self._seven = (self._seven + 1) % _LAP
        if batch.group >= 0:
            self._passages.update(zip(range(batch.first, batch.last), passages, strict=True))
            self._read_of[batch.group] += 1
        self._leaves.append((event, lambda: self._arrived.extend(passages) if batch.group < 0 else None))

    def _runs(self, batch: Batch, passages: list[Passage], read: Any) -> tuple[list[tuple[torch.Tensor, Pieces]], Any]:
        """The planes of a batch that leave as they are, in few runs of device memory, and the event after which they lie there.
        Lowest planes that are even are packed first."""
        base, end, seven = batch.base - self._kept.data_ptr(), 0, 0
        lows, middles, sevens = Pieces(), Pieces(), Pieces()
        packs = list[tuple[int, int, int]]()
        runs = list[tuple[torch.Tensor, Pieces]]()
        for packed, some in itertools.groupby(passages if batch.low else (), lambda passage: passage.packed):
            start, lows = end, []
            for passage in some:
                plane = passage.job.plane
                if packed:
                    packs.append((batch.base + end, self._sevens[self._seven].data_ptr() + seven, plane // 8))
                    sevens.append((passage, "low", seven, plane // 8 * 7))
                    seven += -(-(plane // 8 * 7) // 16) * 16
                else:
                    lows.append((passage, "low", end - start, plane))
                end += passage.job.room
            if lows:
                runs.append((self._kept[base + start : base + end], lows))
        if batch.middle:
            end = 0
            for passage in passages:
                middles.append((passage, "middle", end, passage.job.plane * (batch.width - 2)))
                end += passage.job.room * (batch.width - 2)
            runs.append((self._kept[base + batch.low : base + batch.low + batch.middle], middles))
        if not packs:
            return runs, read
        stream = self._hasty if self._urgent() else self._reading
        stream.wait_event(read)
        if (left := self._seven_left[self._seven]) is not None:
            stream.wait_event(left)
        with torch.cuda.stream(stream):
            kernels.pack7(self._upload(np.array(packs, np.int64)), max(pack[2] for pack in packs))
            return [*runs, (self._sevens[self._seven][:seven], sevens)], stream.record_event()

    def _keep_within_sink(self, batch: Batch) -> None:
        """Chunks that are not complete cannot be handed on: they must never fill the sink, or nothing would move any more. There
        must always be room for all the coded planes that they wait for."""
        need = batch.low + batch.middle + self._tops.numel() + self._packed.size
        while self._complete_groups < batch.group and self._sink.held + need > self._sink.capacity:
            if self._there:
                self._let_packed_leave()
            elif self._codings:
                self._pack(self._codings.popleft())
            elif self._can_code():
                self._code()
            else:
                self._complete()
            self._flush()

    def _write(self, source: torch.Tensor, pieces: Pieces) -> None:
        """Let a run of device memory go, and note for each piece of it where it will lie."""
        parts = self._sink.write(source, [(start, nbytes) for _, _, start, nbytes in pieces], self._relieve)
        for (passage, what, _, _), found in zip(pieces, parts, strict=True):
            passage.parts[what] = found

    def _relieve(self) -> None:
        if self._leaves:
            self._complete()
        self._flush()

    def _can_code(self) -> bool:
        """Whether the next group has been read, and there is room for what will become of it."""
        assert self._program is not None
        groups, next_one = self._program.groups, self._begun
        return next_one < len(groups) and len(self._codings) < _LAP and self._read_of[next_one] == groups[next_one].batches

    def _code(self) -> None:
        """Start to code the next group."""
        assert self._codec is not None
        assert self._program is not None
        number, stream = self._begun, self._coding_stream
        group = self._program.groups[number]
        sources, sizes = self._program.streams[:, group.first_stream : group.last_stream]
        n = len(sources)
        if number >= _LAP:
            stream.wait_event(self._moved[number - _LAP])
        with torch.cuda.stream(stream):
            results = torch.empty((2, n), dtype=torch.int64, device=self._device)
            status = results[1].view(torch.int32)[:n]
            status.fill_(1)
            targets = self._targets[number % _LAP][:n]
            self._codec.compress(sources, sizes, targets, results[0], scratch=self._scratch, status=status)
            found = torch.empty(results.shape, dtype=torch.int64, pin_memory=True).copy_(results, non_blocking=True)
            self._codings.append(_Coding(number, group, found, stream.record_event()))
        self._begun += 1

    def _pack(self, coding: _Coding) -> None:
        """When a group has been coded: put its streams together densely. A plane that did not get smaller stays as it is."""
        assert self._codec is not None
        assert self._program is not None
        coding.done.synchronize()
        group, program = coding.group, self._program
        sizes, status = coding.results.numpy()[0], coding.results.numpy()[1].view(np.int32)[: coding.results.shape[1]]
        if status.any():
            raise RuntimeError(f"nvCOMP could not code {np.count_nonzero(status)} of {len(sizes)} streams (code {status.max()})")
        jobs = program.jobs[group.first : group.last]
        first_of = np.cumsum(group.counts) - group.counts
        totals, planes = np.add.reduceat(sizes, first_of), np.array([job.plane for job in jobs])
        gains = np.repeat(totals < planes, group.counts)
        raw = program.cuts[:, group.first_stream : group.last_stream]
        out = self._outs[coding.number % _LAP].data_ptr() + np.arange(len(sizes)) * self._codec.stride
        lengths = np.where(gains, sizes, raw[1])
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        while (start := self._packed.take(total)) is None:
            self._let_packed_leave() if self._there else self._complete()
        target = self._packed.memory.data_ptr() + start + ends - lengths
        with torch.cuda.stream(self._packing):
            self._packing.wait_event(coding.done)
            rows = np.stack([np.where(gains, out, raw[0]), target, lengths], axis=1)
            kernels.move(self._upload(rows), int(lengths.max()))
            moved = self._packing.record_event()
        self._moved.append(moved)
        pieces, at = Pieces(), 0
        cut = np.split(sizes, first_of[1:])
        for number, mine, size, plane in zip(range(group.first, group.last), cut, totals.tolist(), planes.tolist(), strict=True):
            passage = self._passages.pop(number)
            if size < plane:
                passage.codec, passage.sizes = self._codec.name, mine
            pieces.append((passage, "top", at, min(size, plane)))
            at += min(size, plane)
        self._there.append(_Packed(start, total, pieces, moved))

    def _let_packed_leave(self) -> None:
        """Let the oldest packed group go."""
        packed = self._there.popleft()
        with torch.cuda.stream(self._leaving):
            self._leaving.wait_event(packed.there)
            self._write(self._packed.memory[packed.start : packed.start + packed.size], packed.pieces)
            event = self._leaving.record_event()

        def left() -> None:
            self._packed.give_back()
            self._complete_groups += 1
            self._arrived.extend(passage for passage, _, _, _ in packed.pieces)

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
            self._emit([passage.coded() for passage in arrived])


def _sampled_alike(batch: Batch) -> tuple[bool, int, bool]:
    return batch.scattered, batch.width, batch.packed
