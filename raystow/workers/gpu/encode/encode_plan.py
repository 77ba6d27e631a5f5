"""What an encoder does with a set of chunks, worked out once: a training saves the same tensors again and again.

Nothing in it depends on what the chunks hold, only on where they lie: which are read together, where their planes go, and what
must have left before. So its tables lie in device memory, and a save that is like the one before starts at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....storage.coding.chunk import SMALL
from ...protocol.messages import CodedLayout
from .. import kernel_args
from .jobs import Job, Source

ROWS = 512
"""Chunks in a batch, at most."""


@dataclass(frozen=True)
class Limits:
    """``batch``: raw bytes that are read by one launch, and ``plane`` those of their planes that are to be coded. ``group``: raw
    bytes whose highest planes are coded by one call, and
    ``streams`` their number, at most. ``stream``: bytes of a plane in a stream; 0 if nothing is coded."""

    batch: int
    plane: int
    group: int
    streams: int
    stream: int


@dataclass(frozen=True)
class Batch:
    """Jobs ``first`` to ``last`` (without), which are read by one launch.

    ``base``: where their planes begin in the memory of those that leave as they are: ``low`` bytes of lowest planes, then
    ``middle`` bytes. ``after``: batches that must have left it before. ``group``: what their other planes are coded with, -1 if
    there are none. ``after_group``: groups that must have been packed before those planes have room. ``rotate``, ``width``,
    ``packed``, ``largest``, ``followed``: what ``kernels.split`` wants to know.
    """

    first: int
    last: int
    width: int
    rotate: bool
    scattered: bool
    packed: bool
    largest: int
    base: int
    low: int
    middle: int
    after: int
    group: int
    after_group: int
    followed: str


@dataclass(frozen=True)
class Group:
    """Jobs ``first`` to ``last`` (without), of so many ``batches``, coded by one call. ``streams``: their numbers. Of each plane
    that is coded, one job's after the other's: ``starts``: of its first stream, within the group; ``planes``: its bytes,
    ``nbytes`` all together. ``largest``: streams of the plane that has most. ``owners``: what ``moving.condense`` wants to know,
    on the device."""

    first: int
    last: int
    batches: int
    streams: slice
    starts: Any
    planes: Any
    nbytes: int
    largest: int
    owners: torch.Tensor


class Circle:
    """Regions one behind the other in ``size`` bytes of memory that begin at ``base``, over and over again."""

    def __init__(self, base: int, size: int) -> None:
        self._base, self._size = base, size
        self._placed: list[tuple[int, int]] = []
        self._free = 0  # regions that must be free by now

    def place(self, nbytes: int) -> tuple[int, int]:
        """The address of a new region, and how many of those before it must be free by then."""
        nbytes = -(-nbytes // 512) * 512
        if nbytes > self._size:
            raise ValueError(f"{nbytes} bytes do not go into {self._size}")
        start = self._placed[-1][1] if self._placed else 0
        if start + nbytes > self._size:
            start = 0
        for i in range(self._free, len(self._placed)):
            if self._placed[i][0] < start + nbytes and start < self._placed[i][1]:
                self._free = i + 1
        self._placed.append((start, start + nbytes))
        return self._base + start, self._free


class Program:
    """``jobs`` in the order in which they are read, ``batches`` and ``groups`` of them. ``starts``: where each job's lowest plane
    begins among those of its batch. Tables: ``chunks`` for the kernels (int64 [jobs, COLUMNS]; in host memory ``table``), and for
    the coder ``cuts`` (int64 [2, streams]: address, bytes)."""

    def __init__(self, sources: Sequence[Source], limits: Limits, *, kept: torch.Tensor, tops: torch.Tensor) -> None:
        self.key, self.sources = key(sources), sources
        found = [_job(i, source, limits.stream) for i, source in enumerate(sources)]
        self.jobs = sorted(found, key=_kind)
        self.batches: list[Batch] = []
        self.groups: list[Group] = []
        self._limits, self._device = limits, kept.device
        table = np.zeros((len(self.jobs), kernel_args.COLUMNS), np.int64)
        table[:, 0] = [job.address or 0 for job in self.jobs]
        table[:, 1] = [job.nbytes // job.width for job in self.jobs]
        self.starts = np.zeros(len(self.jobs), np.int64)
        self._lay_out(table, Circle(kept.data_ptr(), kept.numel()), Circle(tops.data_ptr(), tops.numel()))
        self.table = table
        self.chunks, self.cuts = (torch.from_numpy(rows).to(self._device) for rows in (table, self._cut(table)))

    def fits(self, sources: Sequence[Source]) -> bool:
        """Whether it is what to do with these, too."""
        return self.sources is sources or self.key == key(sources)

    def layout(self, device: int, sources: Sequence[Source]) -> CodedLayout:
        """Return what is announced of the chunks once for all saves."""
        return CodedLayout(
            device,
            tuple([sources[job.index].describe() for job in self.jobs]),
            nbytes=tuple([job.nbytes for job in self.jobs]),
            streams=tuple([job.stream for job in self.jobs]),
            starts=tuple(self.starts.tolist()),
            planes=tuple([sum(1 << p for p in job.high) for job in self.jobs]),
            batches=tuple([(batch.first, batch.last, batch.low) for batch in self.batches]),
        )

    @functools.cached_property
    def full(self) -> int:
        """The number of the first batch that waits for others to make room, or of batches if none does."""
        return next((i for i, batch in enumerate(self.batches) if batch.after or batch.after_group), len(self.batches))

    def _lay_out(self, table: Any, kept: Circle, tops: Circle) -> None:
        """Place the planes of all batches, and put the groups together."""
        group_of: list[int] = []  # of each region in ``tops``
        raw, streams = 0, 0  # of the group that is being put together
        for first, last in self._cuts():
            jobs = self.jobs[first:last]
            head = jobs[0]
            rooms = np.array([job.room for job in jobs])
            planes, width = int(rooms.sum()), head.width
            starts = np.cumsum(rooms) - rooms
            self.starts[first:last] = starts
            between = [p for p in head.low if p > 0]
            low, middle = planes * (0 in head.low), planes * len(between)
            base, after = kept.place(low + middle)
            if low:
                table[first:last, 2] = base + starts
            for i, p in enumerate(between):
                table[first:last, 2 + p] = base + low + starts * len(between) + i * np.array([job.plane for job in jobs])
            group, after_group = -1, 0
            if head.coded:
                coded = len(head.high)
                more, size = sum(job.streams * coded for job in jobs), sum(job.nbytes for job in jobs)
                if more > self._limits.streams:  # of a single chunk: batches are cut before
                    raise ValueError(f"{more} streams are more than the {self._limits.streams} that are coded by one call")
                if raw + size > self._limits.group or streams + more > self._limits.streams:
                    raw, streams = 0, 0
                    self._close_group(first)
                group = len(self.groups)
                address, regions = tops.place(planes * coded)
                for i, p in enumerate(head.high):
                    table[first:last, 2 + p] = address + starts * coded + i * rooms
                after_group = group_of[regions - 1] + 1 if regions else 0
                assert after_group <= group, "a group must fit into half of the memory for highest planes"
                group_of.append(group)
                raw, streams = raw + size, streams + more
            largest = max(job.nbytes for job in jobs)
            packed = kernel_args.can_pack(table[first:last], width)
            self.batches.append(
                Batch(
                    *(first, last, width, head.coded and head.dtype.rotate, head.address is None, packed),
                    *(largest, base, low, middle, after, group, after_group),
                    followed=head.followed,
                )
            )
        self._close_group(len(self.jobs))

    def _close_group(self, last: int) -> None:
        """All coded jobs that are in no group yet, up to ``last``, are one."""
        before = self.groups[-1] if self.groups else None
        jobs = [i for i in range(before.last if before else 0, last) if self.jobs[i].coded]
        if not jobs:
            return
        counts = np.array([self.jobs[i].streams for i in jobs for _ in self.jobs[i].high])
        planes = np.array([self.jobs[i].plane for i in jobs for _ in self.jobs[i].high])
        starts, begin = np.cumsum(counts) - counts, before.streams.stop if before else 0
        owners = np.append(np.stack([starts, planes], axis=1), [[counts.sum(), 0]], axis=0)
        batches = sum(batch.group == len(self.groups) for batch in self.batches)
        streams = slice(begin, begin + int(counts.sum()))
        nbytes, largest, on_device = int(planes.sum()), int(counts.max()), torch.from_numpy(owners).to(self._device)
        self.groups.append(Group(jobs[0], jobs[-1] + 1, batches, streams, starts, planes, nbytes, largest, on_device))

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Chunks of one kind (all of one width; all with a plane to code, or all without) in numbers that one launch takes."""
        first, position = 0, 0
        for _, alike in itertools.groupby(self.jobs, _kind):
            size = planes = streams = 0
            for job in alike:
                coded, more = job.plane * len(job.high), job.streams * len(job.high)
                size, planes, streams = size + job.nbytes, planes + coded, streams + more
                wide = job.coded and (planes > self._limits.plane or streams > self._limits.streams)
                if position > first and (size > self._limits.batch or wide or position - first == ROWS):
                    yield first, position
                    first, size, planes, streams = position, job.nbytes, coded, more
                position += 1
            yield first, position
            first = position

    def _cut(self, table: Any) -> Any:
        """Address and bytes of every stream, group after group."""
        stream = self._limits.stream
        rows = [np.empty((2, 0), np.int64)]
        for group in self.groups:
            jobs = self.jobs[group.first : group.last]
            n = group.streams.stop - group.streams.start
            owner = np.searchsorted(group.starts, np.arange(n), side="right") - 1
            at = (np.arange(n) - group.starts[owner]) * stream
            tops = np.concatenate([row[[2 + p for p in job.high]] for row, job in zip(table[group.first :], jobs, strict=False)])
            rows.append(np.stack([tops[owner] + at, np.minimum(stream, group.planes[owner] - at)]))
        return np.ascontiguousarray(np.concatenate(rows, axis=1))


def key(sources: Sequence[Source]) -> list[tuple[int | None, int, Any]]:
    """What a program depends on: two sets of chunks with equal keys can use the same."""
    return [(source.address, source.nbytes, source.identity) for source in sources]


def _kind(job: Job) -> Any:
    return job.kind


def _job(index: int, source: Source, stream: int) -> Job:
    of = source.name, source.address, source.nbytes, source.dtype
    if not stream or source.nbytes < SMALL:
        return Job(index, *of)
    return Job(index, *of, stream, source.planes, source.followed)
