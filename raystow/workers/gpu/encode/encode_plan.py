"""The encoder's plan for a set of chunks: batches that are read together, groups that are coded together, and places in memory.

It depends on the places and types of the chunks, not on their content. Training saves the same tensors again and again, so the
plan is made once, and its tables stay in device memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from ...protocol.messages import CodedLayout
from .. import kernel_args
from ..encode_request import Source
from ..kernel_args import Addressed, part
from .jobs import Job

ROWS = 512
"""The largest number of chunks in a batch."""

Indices = npt.NDArray[np.int64]

_KIND = attrgetter("kind")


@dataclass(frozen=True)
class Limits:
    """The largest batches and groups."""

    batch: int  # raw bytes in a batch
    plane: int  # bytes of a batch's planes that are coded
    group: int  # raw bytes in a group
    streams: int  # coded streams in a group
    stream: int  # bytes of a plane in each coded stream; 0 if nothing is coded


@dataclass(frozen=True)
class Batch:
    """Jobs ``first`` to ``last`` (exclusive), which are read by one launch of ``word_kernels.split``.

    ``width``, ``rotate``, ``packed`` and ``largest`` are arguments of the launch.
    """

    first: int
    last: int
    width: int
    rotate: bool
    scattered: bool  # the chunks must be gathered first
    on_host: bool  # from host memory
    packed: bool
    largest: int
    base: int  # where its raw planes begin in device memory
    low: int  # bytes of lowest planes there
    middle: int  # bytes of other raw planes, after those
    after: int  # the number of batches whose raw planes must have left device memory before
    group: int  # the group that codes its other planes; -1 if there are none
    after_group: int  # the number of groups that must have been coded before, so that there is memory for those planes


@dataclass(frozen=True)
class Group:
    """Jobs ``first`` to ``last`` (exclusive), whose high planes are coded by one call."""

    first: int
    last: int
    batches: int  # the number of its batches
    streams: slice  # the numbers of its streams among those of all groups
    starts: Indices  # for each plane, job by job, its first stream within the group
    planes: Indices  # bytes of each plane
    nbytes: int  # of all planes
    largest: int  # the largest number of streams of a plane
    owners: torch.Tensor  # the argument of ``copy_kernels.condense``, on the device

    @property
    def count(self) -> int:
        """The number of its streams."""
        return int(self.streams.stop - self.streams.start)


class Circle:
    """Plans consecutive regions in ``size`` bytes of memory at ``base``, starting again from its beginning when it is full."""

    def __init__(self, base: int, size: int) -> None:
        self._base, self._size = base, size
        self._placed: list[tuple[int, int]] = []
        self._free = 0  # the number of oldest regions that must be free by now

    def place(self, nbytes: int) -> tuple[int, int]:
        """Return the address of a new region, and how many of the earlier regions must be free before it is used."""
        nbytes = -(-nbytes // 512) * 512
        if nbytes > self._size:
            raise ValueError(f"{nbytes} bytes do not fit into {self._size}")
        start = self._placed[-1][1] if self._placed else 0
        if start + nbytes > self._size:
            start = 0
        for i in range(self._free, len(self._placed)):
            if self._placed[i][0] < start + nbytes and start < self._placed[i][1]:
                self._free = i + 1
        self._placed.append((start, start + nbytes))
        return self._base + start, self._free


class EncodePlan:
    """How to encode ``sources``, with device memory for planes that are stored raw (low) and that are coded (high).

    Attributes:
        jobs: The chunks in the order in which they are read; ``batches`` and ``groups`` are ranges of them.
        order: For each job the number of its source.
        starts: For each job the start of its lowest plane among those of its batch.
        table: The kernels' table, int64 [jobs, COLUMNS] in host memory; ``chunks`` is its copy on the device.
        cuts: The coder's table on the device, int64 [2, streams]: address and bytes of each stream.
    """

    def __init__(self, sources: Sequence[Source], limits: Limits, *, low_planes: torch.Tensor, high_planes: torch.Tensor) -> None:
        self.key, self.sources = key(sources), sources
        self.jobs = sorted((Job.of(i, source, limits.stream) for i, source in enumerate(sources)), key=_KIND)
        self.order = np.array([job.index for job in self.jobs], np.int64)
        self.batches: list[Batch] = []
        self.groups: list[Group] = []
        self._limits, self._device = limits, low_planes.device
        table = np.zeros((len(self.jobs), kernel_args.COLUMNS), np.int64)
        table[:, 0] = [job.address or 0 for job in self.jobs]
        table[:, 1] = [job.nbytes // job.width for job in self.jobs]
        self.starts = np.zeros(len(self.jobs), np.int64)
        self._lay_out(table, *(Circle(memory.data_ptr(), memory.numel()) for memory in (low_planes, high_planes)))
        self.table = table
        self.chunks, self.cuts = (torch.from_numpy(rows).to(self._device) for rows in (table, self._cut(table)))

    def rows(self, first: int, last: int) -> Addressed:
        """Return a part of ``chunks``."""
        return part(self.chunks, first, last - first, kernel_args.COLUMNS)

    def cuts_of(self, group: Group) -> tuple[Addressed, Addressed]:
        """Return the rows of ``cuts`` for the streams of a group."""
        start = group.streams.start
        return part(self.cuts, start, group.count), part(self.cuts, self.cuts.shape[1] + start, group.count)

    def fits(self, sources: Sequence[Source]) -> bool:
        """Whether the plan is also valid for these chunks."""
        return self.sources is sources or self.key == key(sources)

    def layout(self, device: int, sources: Sequence[Source]) -> CodedLayout:
        """Return the message that describes the chunks, which is sent once for all saves."""
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
        """The number of the first batch that waits for memory of earlier ones; the number of batches if none does."""
        return next((i for i, batch in enumerate(self.batches) if batch.after or batch.after_group), len(self.batches))

    def _lay_out(self, table: Indices, low_memory: Circle, high_memory: Circle) -> None:
        """Place the planes of all batches in memory, and form the groups."""
        group_of: list[int] = []  # of each region in high_memory
        raw, streams = 0, 0  # of the current group
        for first, last in self._cuts():
            jobs = self.jobs[first:last]
            head = jobs[0]
            padded = np.array([job.padded for job in jobs])
            planes, width = int(padded.sum()), head.width
            starts = np.cumsum(padded) - padded
            self.starts[first:last] = starts
            between = [p for p in head.low if p > 0]
            low, middle = planes * (0 in head.low), planes * len(between)
            base, after = low_memory.place(low + middle)
            if low:
                table[first:last, 2] = base + starts
            for i, p in enumerate(between):
                table[first:last, 2 + p] = base + low + starts * len(between) + i * np.array([job.plane for job in jobs])
            group, after_group = -1, 0
            if head.coded:
                coded = len(head.high)
                more, size = sum(job.streams * coded for job in jobs), sum(job.nbytes for job in jobs)
                if more > self._limits.streams:  # only of a single chunk: larger batches are split
                    raise ValueError(f"{more} streams are more than the {self._limits.streams} that are coded by one call")
                if raw + size > self._limits.group or streams + more > self._limits.streams:
                    raw, streams = 0, 0
                    self._close_group(first)
                group = len(self.groups)
                address, regions = high_memory.place(planes * coded)
                for i, p in enumerate(head.high):
                    table[first:last, 2 + p] = address + starts * coded + i * padded
                after_group = group_of[regions - 1] + 1 if regions else 0
                assert after_group <= group, "a group must fit into half of the memory for high planes"
                group_of.append(group)
                raw, streams = raw + size, streams + more
            self.batches.append(
                Batch(
                    first,
                    last,
                    width=width,
                    rotate=head.coded and head.dtype.rotate,
                    scattered=head.address is None,
                    on_host=head.on_host,
                    packed=kernel_args.can_pack(table[first:last], width),
                    largest=max(job.nbytes for job in jobs),
                    base=base,
                    low=low,
                    middle=middle,
                    after=after,
                    group=group,
                    after_group=after_group,
                )
            )
        self._close_group(len(self.jobs))

    def _close_group(self, last: int) -> None:
        """Form a group of all coded jobs before ``last`` that are in no group yet."""
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
        """Yield the ranges of jobs that form batches: of one kind, within the limits."""
        first, position = 0, 0
        for _, alike in itertools.groupby(self.jobs, _KIND):
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

    def _cut(self, table: Indices) -> Indices:
        """Return address and bytes of every stream, group after group."""
        stream = self._limits.stream
        rows = [np.empty((2, 0), np.int64)]
        for group in self.groups:
            jobs = self.jobs[group.first : group.last]
            n = group.count
            owner = np.searchsorted(group.starts, np.arange(n), side="right") - 1
            at = (np.arange(n) - group.starts[owner]) * stream
            planes = np.concatenate(
                [row[[2 + p for p in job.high]] for row, job in zip(table[group.first :], jobs, strict=False)]
            )
            rows.append(np.stack([planes[owner] + at, np.minimum(stream, group.planes[owner] - at)]))
        return np.ascontiguousarray(np.concatenate(rows, axis=1))


def key(sources: Sequence[Source]) -> list[tuple[int | None, int, object]]:
    """Return the properties of chunks on which a plan depends: chunks with equal keys can use the same plan."""
    return [(source.address, source.nbytes, source.identity) for source in sources]
