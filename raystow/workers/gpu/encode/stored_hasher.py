"""Computes the digests of what is stored of chunks, while it is in device memory, so that no CPU has to read it.

BLAKE3 is a tree over leaves of 1 KiB. The leaves of planes that are not coded are hashed as soon as a batch has been read,
because its memory is needed again; those of coded planes, and the trees, when their group has been coded. A leaf with bytes of
two planes is put together in memory of its own first.
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
from .encode_plan import EncodePlan
from .jobs import Job
from .stages import CodedGroup, ReadBatch, TakenDigests

LEAST = 64 << 10
"""Bytes of the smallest chunk that is hashed here. The node worker computes the digests of others."""

_Numbers = npt.NDArray[np.int64]


@dataclass
class _Leaves:
    """The leaves of some jobs. ``first``: the number of the first job; ``values``: the memory of their values. For each job:

    ``starts``: the number of its first value.
    ``joints``: the address of the memory for the next leaf that is put together; there is memory for one after each plane.
    ``hashed``: how many of its bytes are hashed, or put together; -1 if it is not hashed here.
    ``order``: the planes that are not coded, as they are stored.
    """

    first: int
    values: Addressed
    starts: _Numbers
    joints: _Numbers
    hashed: _Numbers
    order: list[tuple[int, ...]]

    def cover(self, jobs: _Numbers, addresses: _Numbers, sizes: _Numbers, *, last: bool) -> tuple[_Numbers, _Numbers]:
        """Return how to hash the next bytes of some jobs, which are at these addresses.

        Args:
            last: Whether these are the last bytes.

        Returns:
            The table of ``copy_kernels.move``, which puts leaves together, and after that the one of ``blake3_kernels.leaves``.
        """
        at, starts, joints = self.hashed[jobs], self.starts[jobs], self.joints[jobs]
        begun = at % LEAF  # bytes of a leaf that is being put together
        more = np.where(begun > 0, np.minimum(LEAF - begun, sizes), 0)
        complete = (begun > 0) & ((begun + more == LEAF) | last)
        number, after = at // LEAF, (at + more) // LEAF
        rest = sizes - more
        whole = rest if last else rest // LEAF * LEAF
        following = joints + LEAF * complete
        moves = np.concatenate(
            (
                np.stack((addresses, joints + begun, more), axis=1),
                np.stack((addresses + more + whole, following, rest - whole), axis=1),
            )
        )
        rows = np.concatenate(
            (
                np.stack((joints, (begun + more) * complete, starts + number, number), axis=1),
                np.stack((addresses + more, whole, starts + after, after), axis=1),
            )
        )
        self.hashed[jobs], self.joints[jobs] = at + sizes, following
        return moves[moves[:, 2] > 0], rows[rows[:, 1] > 0]


class StoredHasher:
    """Hashes the chunks of one save. One stream does everything, so memory for values can be reused at once."""

    def __init__(self, plan: EncodePlan, resources: EncoderResources) -> None:
        self._plan, self._memory, self._stream = plan, resources.memory, resources.streams.hash
        self._device = plan.chunks.device
        self._groups: dict[int, _Leaves | None] = {}  # that are being hashed, by number; None: there is no memory for the values

    def add(self, read: ReadBatch, packed: torch.cuda.Event | None, copied: torch.cuda.Event) -> torch.cuda.Event:
        """Hash the planes of a batch that are not coded; return the event after which they are hashed and copied.

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
                self._hash_batch(read, leaves)
            if batch.group < 0:
                read.digests = self._end(leaves, batch.last - batch.first)
            self._stream.wait_event(copied)
            return self._stream.record_event()

    def finish(self, coded: CodedGroup) -> TakenDigests:
        """Hash the coded planes of a group, and compute the digests of its chunks."""
        group, lengths = coded.group, coded.results[0].numpy()
        leaves = self._groups.pop(coded.batches[0].batch.group)
        jobs = self._plan.jobs[group.first : group.last]
        planes = np.array([len(job.high) for job in jobs])
        firsts = np.cumsum(planes) - planes
        sizes = np.add.reduceat(lengths, group.starts)  # of each plane
        smaller, totals = sizes < group.planes, np.add.reduceat(sizes, firsts)
        with torch.cuda.stream(self._stream):
            if leaves is not None:
                for i in np.flatnonzero(~np.logical_and.reduceat(smaller, firsts)).tolist():
                    if not _in_order(jobs[i], leaves.order[i], smaller[firsts[i] : firsts[i] + planes[i]].tolist()):
                        leaves.hashed[i] = -1
                some = np.flatnonzero(leaves.hashed >= 0)
                addresses = self._memory.dense.memory.data_ptr() + coded.start + np.cumsum(totals) - totals
                self._launch([leaves.cover(some, addresses[some], totals[some], last=True)], leaves)
            return self._end(leaves, len(jobs))

    def _begin(self, first: int, last: int) -> _Leaves | None:
        """Take memory for the leaves of some jobs: for as many as their raw bytes have. None if there is none."""
        jobs = self._plan.jobs[first:last]
        counts, widths = (np.array(of) for of in ([leaf_count(job.nbytes) for job in jobs], [job.width for job in jobs]))
        values, memory = VALUE * int(counts.sum()), self._memory.values
        start = memory.take(values + LEAF * int(widths.sum())) if values <= self._memory.tree.numel() else None
        if start is None:
            return None
        address = memory.memory.data_ptr() + start
        return _Leaves(
            first,
            Addressed(address, 0, self._device, torch.uint32),
            starts=np.cumsum(counts) - counts,
            joints=address + values + LEAF * (np.cumsum(widths) - widths),
            hashed=np.array([0 if job.nbytes >= LEAST else -1 for job in jobs]),
            order=[job.low for job in jobs],
        )

    def _hash_batch(self, read: ReadBatch, leaves: _Leaves) -> None:
        """Hash the planes of a batch in the order in which they are stored: packed ones after the others."""
        batch = read.batch
        jobs, first = self._plan.jobs[batch.first : batch.last], batch.first - leaves.first
        planes = jobs[0].low
        addresses = self._plan.table[batch.first : batch.last, [2 + p for p in planes]]
        sizes = np.repeat([[job.plane] for job in jobs], len(planes), axis=1)
        for i, (_, at, packed) in enumerate(read.lows):
            if packed:
                leaves.order[first + i] = (*planes[1:], 0)
                addresses[i] = (*addresses[i, 1:], read.packed_at + at)
                sizes[i, -1] = jobs[i].plane // 8 * 7
        some = np.flatnonzero(leaves.hashed[first : first + len(jobs)] >= 0)
        last = not jobs[0].coded
        covers = [leaves.cover(first + some, addresses[some, i], sizes[some, i], last=last) for i in range(len(planes))]
        self._launch(covers, leaves)

    def _launch(self, covers: Sequence[tuple[_Numbers, _Numbers]], leaves: _Leaves) -> None:
        """Put leaves together, and hash ranges: see ``_Leaves.cover``."""
        if not sum(len(moves) + len(rows) for moves, rows in covers):
            return
        moves, rows = (np.concatenate(of) for of in zip(*covers, strict=True))
        table = upload(np.concatenate((moves, rows), axis=None), self._device)
        if len(moves):
            copy_kernels.move(Addressed(table.data_ptr(), len(moves), self._device), LEAF)
        if len(rows):
            place = table.data_ptr() + moves.nbytes
            blake3_kernels.leaves(Addressed(place, len(rows), self._device), int(rows[:, 1].max()), leaves.values)

    def _end(self, leaves: _Leaves | None, jobs: int) -> TakenDigests:
        """Compute the digests of the jobs that are hashed here."""
        some, found = np.empty(0, np.int64), torch.empty((0, 4), dtype=torch.int64)
        if leaves is not None:
            some = np.flatnonzero(leaves.hashed >= 0)
            if len(some):
                zeros = np.zeros_like(some)
                rows = np.stack((zeros, leaves.hashed[some], leaves.starts[some], zeros), axis=1)
                digests = torch.empty((len(some), 4), dtype=torch.int64, device=self._device)
                others = Addressed(self._memory.tree.data_ptr(), 0, self._device, torch.uint32)
                to = Addressed(digests.data_ptr(), 0, self._device, torch.uint32)
                blake3_kernels.tree(upload(rows, self._device), leaves.values, others, to)
                found = copy_kernels.to_host(digests)
            self._memory.values.give_back()
        return TakenDigests(jobs, some, found, self._stream.record_event())


def _in_order(job: Job, low: tuple[int, ...], smaller: Sequence[bool]) -> bool:
    """Whether the planes are stored in the order in which they are hashed: ``low`` and then the coded ones. A plane that coding
    did not make ``smaller`` is stored with the raw ones."""
    last = {p for p, less in zip(job.high, smaller, strict=True) if less} | ({0} if low != job.low else set())
    return sorted(range(job.width), key=lambda p: (p in last, p)) == [*low, *job.high]
