"""Computes the digests of what is stored of chunks, while it is in device memory, so that no CPU has to read it.

BLAKE3 is a tree over leaves of 1 KiB. The leaves of planes that are not coded are hashed as soon as a batch has been read,
because its memory is needed again; those of coded planes, and the trees, when their group has been coded. A leaf of two planes
would need both at once: chunks whose planes are not whole leaves are left to the node worker, and small ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..kernel_args import Addressed, upload
from ..kernels import blake3_kernels, copy_kernels
from ..kernels.blake3_kernels import VALUE, leaf_count
from ..kernels.constants import LEAF
from .device_memory import EncoderResources
from .encode_plan import Batch, EncodePlan
from .jobs import Job
from .stages import CodedGroup, ReadBatch, TakenDigests

LEAST = 64 << 10
"""Bytes of the smallest chunk that is hashed here."""

_Rows = list[tuple[int, int, int, int]]  # see blake3_kernels


@dataclass
class _Leaves:
    """The leaves of some jobs. ``first``: the number of the first job; ``values``: the memory of their values. For each job,
    ``starts``: where its values begin; ``raw``: the leaves of its planes that are not coded, or -1 if it is not hashed here;
    ``order``: these planes in the order in which they are stored."""

    first: int
    values: Addressed
    starts: npt.NDArray[np.int64]
    raw: npt.NDArray[np.int64]
    order: list[tuple[int, ...]]


class StoredHasher:
    """Hashes the chunks of one save. One stream does everything, so memory for values can be reused at once."""

    def __init__(self, plan: EncodePlan, resources: EncoderResources) -> None:
        self._plan, self._memory, self._stream = plan, resources.memory, resources.streams.hash
        self._device = plan.chunks.device
        self._groups: dict[int, _Leaves | None] = {}  # that are being hashed, by number; None: there is no memory for the values

    def add(self, read: ReadBatch, packed: torch.cuda.Event | None, copied: torch.cuda.Event) -> torch.cuda.Event:
        """Hash the raw planes of a batch; return the event after which they are hashed and copied.

        Args:
            packed: The event after which its lowest planes are packed, if some are.
            copied: The event after which the planes are copied.
        """
        batch = read.batch
        if batch.group < 0:
            leaves = self._begin(batch.first, batch.last)
        else:
            if batch.group not in self._groups:
                group = self._plan.groups[batch.group]
                self._groups[batch.group] = self._begin(group.first, group.last)
            leaves = self._groups[batch.group]
        with torch.cuda.stream(self._stream):
            if packed is not None:
                self._stream.wait_event(packed)
            if leaves is not None:
                self._hash(self._raw_planes(read, leaves), leaves)
            if batch.group < 0:
                read.digests = self._end(leaves, [job.nbytes for job in self._jobs(batch)])
            self._stream.wait_event(copied)
            return self._stream.record_event()

    def finish(self, coded: CodedGroup) -> TakenDigests:
        """Hash the coded planes of a group, and compute the digests of its chunks."""
        group, lengths = coded.group, coded.results[0].numpy()
        leaves = self._groups.pop(coded.batches[0].batch.group)
        sizes = np.add.reduceat(lengths, group.starts)  # of each plane
        smaller, at, rows, totals = sizes < group.planes, 0, _Rows(), list[int]()
        address, plane = self._memory.dense.memory.data_ptr() + coded.start, 0
        for number, job in enumerate(self._plan.jobs[group.first : group.last]):
            planes = slice(plane, plane := plane + len(job.high))
            size, total = int(sizes[planes].sum()), 0
            if leaves is not None and leaves.raw[number] >= 0 and _in_order(job, leaves.order[number], smaller[planes].tolist()):
                raw = int(leaves.raw[number])
                rows.append((address + at, size, int(leaves.starts[number]) + raw, raw))
                total = raw * LEAF + size
            totals.append(total)
            at += size
        with torch.cuda.stream(self._stream):
            if leaves is not None:
                self._hash(rows, leaves)
            return self._end(leaves, totals)

    def _jobs(self, batch: Batch) -> list[Job]:
        return self._plan.jobs[batch.first : batch.last]

    def _begin(self, first: int, last: int) -> _Leaves | None:
        """Take memory for the values of some jobs: for as many as their raw bytes have. None if there is none."""
        counts = np.array([leaf_count(job.nbytes) for job in self._plan.jobs[first:last]], np.int64)
        nbytes = VALUE * int(counts.sum())
        memory = self._memory.values
        start = memory.take(nbytes) if nbytes <= self._memory.tree.numel() else None
        if start is None:
            return None
        values = Addressed(memory.memory.data_ptr() + start, 0, self._device, torch.uint32)
        return _Leaves(first, values, np.cumsum(counts) - counts, np.full(len(counts), -1), [()] * len(counts))

    def _raw_planes(self, read: ReadBatch, leaves: _Leaves) -> _Rows:
        """Return a row for each raw plane of a batch, and note how many leaves they have."""
        rows, batch = _Rows(), read.batch
        table = self._plan.table[batch.first : batch.last].tolist()
        for i, job in enumerate(self._jobs(batch)):
            order, places = job.low, [(table[i][2 + p], job.plane) for p in job.low]
            if read.lows and read.lows[i][2]:  # the lowest plane is packed, and stored after the others
                order, places = (*order[1:], 0), [*places[1:], (read.packed_at + read.lows[i][1], job.plane // 8 * 7)]
            whole = not job.coded or not any(size % LEAF for _, size in places)
            if job.nbytes < LEAST or not whole:
                continue
            number, before = batch.first + i - leaves.first, 0
            for address, size in places:
                rows.append((address, size, int(leaves.starts[number]) + before, before))
                before += leaf_count(size)
            leaves.raw[number], leaves.order[number] = before, order
        return rows

    def _hash(self, rows: _Rows, leaves: _Leaves) -> None:
        if rows:
            table = upload(np.array(rows, np.int64), self._device)
            blake3_kernels.leaves(table, max(size for _, size, _, _ in rows), leaves.values)

    def _end(self, leaves: _Leaves | None, totals: Sequence[int]) -> TakenDigests:
        """Compute the digests of jobs that have so many bytes, except of those that are not hashed here."""
        places, found = list[int](), torch.empty((0, 4), dtype=torch.int64)
        if leaves is not None:
            places = [i for i, total in enumerate(totals) if total and leaves.raw[i] >= 0]
            if places:
                table = upload(np.array([(0, totals[i], leaves.starts[i], 0) for i in places], np.int64), self._device)
                digests = torch.empty((len(places), 4), dtype=torch.int64, device=self._device)
                others = Addressed(self._memory.tree.data_ptr(), 0, self._device, torch.uint32)
                blake3_kernels.tree(table, leaves.values, others, Addressed(digests.data_ptr(), 0, self._device, torch.uint32))
                found = copy_kernels.to_host(digests)
            self._memory.values.give_back()
        return TakenDigests(len(totals), places, found, self._stream.record_event())


def _in_order(job: Job, low: tuple[int, ...], smaller: Sequence[bool]) -> bool:
    """Whether the planes are stored in the order in which they are hashed: ``low`` and then the coded ones. A plane that coding
    did not make ``smaller`` is stored with the raw ones."""
    if all(smaller):
        return True
    last = {p for p, less in zip(job.high, smaller, strict=True) if less} | ({0} if low != job.low else set())
    return sorted(range(job.width), key=lambda p: (p in last, p)) == [*low, *job.high]
