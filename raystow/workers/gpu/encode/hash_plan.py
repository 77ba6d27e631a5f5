"""How the chunks of a plan are hashed: where the values of leaves go, and the tables of the kernels for raw planes.

BLAKE3 is a tree over leaves of 1 KiB. A leaf with bytes of two planes is put together in memory of its own first.

Like the plan of the encoder, it depends on the places of the chunks, and on which lowest planes can be packed; both are nearly
always those of the last save. So its tables are made once, and stay in device memory: Python code in a save costs the training
time.
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
from .encode_plan import Circle, EncodePlan
from .jobs import Job
from .stages import ReadBatch

LEAST = 64 << 10
"""Bytes of the smallest chunk that is hashed here. The node worker computes the digests of others."""

_Numbers = npt.NDArray[np.int64]


@dataclass
class Leaves:
    """The leaves of some chunks, as far as they are hashed. For each chunk:

    ``starts``: the number of its first value.
    ``joints``: the address of the memory for the next leaf that is put together; there is memory for one after each plane.
    ``hashed``: how many of its bytes are hashed, or put together.
    """

    starts: _Numbers
    joints: _Numbers
    hashed: _Numbers

    def cover(self, addresses: _Numbers, sizes: _Numbers, *, last: bool) -> tuple[_Numbers, _Numbers]:
        """Return how to hash the next bytes of each chunk, which are at these addresses.

        Args:
            last: Whether these are the last bytes.

        Returns:
            The table of ``copy_kernels.move``, which puts leaves together, and after that the one of ``blake3_kernels.leaves``.
        """
        at, starts, joints = self.hashed, self.starts, self.joints
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
        self.hashed, self.joints = at + sizes, following
        return moves[moves[:, 2] > 0], rows[rows[:, 1] > 0]

    def trees(self) -> _Numbers:
        """Return the table of ``blake3_kernels.tree``, once all bytes are hashed."""
        zeros = np.zeros_like(self.starts)
        return np.stack((zeros, self.hashed, self.starts, zeros), axis=1)

    def some(self, chosen: Sequence[bool]) -> Leaves:
        """Return the leaves of chosen chunks."""
        return Leaves(self.starts[chosen], self.joints[chosen], self.hashed[chosen])

    @staticmethod
    def joined(parts: Sequence[Leaves]) -> Leaves:
        """Return the leaves of all chunks."""
        return Leaves(*(np.concatenate(of) for of in zip(*((one.starts, one.joints, one.hashed) for one in parts), strict=True)))


class HashTable:
    """Tables on the device: which leaves are put together, which are hashed, and of which the digests are computed."""

    def __init__(self, covers: Sequence[tuple[_Numbers, _Numbers]], trees: _Numbers, device: torch.device) -> None:
        moves = np.concatenate([np.empty((0, 3), np.int64), *(moves for moves, _ in covers)])
        rows = np.concatenate([np.empty((0, 4), np.int64), *(rows for _, rows in covers)])
        self._memory = upload(np.concatenate((moves, rows, trees), axis=None), device)
        at = self._memory.data_ptr()
        self._moves = Addressed(at, len(moves), device)
        self._rows = Addressed(at + moves.nbytes, len(rows), device)
        self._trees = Addressed(at + moves.nbytes + rows.nbytes, len(trees), device)
        self._largest = int(rows[:, 1].max(initial=0))

    def hash(self, values: Addressed) -> None:
        """Hash the leaves."""
        if len(self._moves):
            copy_kernels.move(self._moves, LEAF)
        if len(self._rows):
            blake3_kernels.leaves(self._rows, self._largest, values)

    def digests(self, values: Addressed, others: Addressed) -> torch.Tensor:
        """Return the digests, int64 [trees, 4] in pinned memory, complete once the current stream has executed this. For
        ``others`` see ``blake3_kernels.tree``."""
        found = torch.empty((len(self._trees), 4), dtype=torch.int64, device=values.device)
        if len(self._trees):
            to = Addressed(found.data_ptr(), 0, values.device, torch.uint32)
            blake3_kernels.tree(self._trees, values, others, to)
        return copy_kernels.to_host(found)


@dataclass(frozen=True)
class HashedTogether:
    """Jobs whose digests are computed together: those of a group, or of a batch without coding.

    Args:
        first: The number of the first one.
        values: Memory for the values of their leaves.
        starts, joints: See ``Leaves``.
        firsts: For each job the number of its first coded plane.
        after: How many such ranges must have digests before, so that the memory is free.
    """

    first: int
    values: Addressed
    starts: _Numbers
    joints: _Numbers
    firsts: _Numbers
    after: int


@dataclass(frozen=True)
class RawLeaves:
    """How the raw planes of a batch are hashed.

    Args:
        key: What it depends on besides the plan.
        places: The jobs that are hashed, from the first of the batch.
        leaves: Their leaves after that.
        order: The planes of each job that are not coded, as they are stored.
    """

    key: object
    places: _Numbers
    leaves: Leaves
    order: Sequence[tuple[int, ...]]
    table: HashTable


class HashPlan:
    """How the chunks of an encoder's plan are hashed. ``values``, ``tree``: memory of the encoder for leaves."""

    def __init__(self, plan: EncodePlan, *, values: torch.Tensor, tree: torch.Tensor) -> None:
        self._plan, self._device = plan, plan.chunks.device
        self.tree = Addressed(tree.data_ptr(), 0, self._device, torch.uint32)
        self._raw = dict[int, RawLeaves]()  # by the number of the batch
        groups = [(group.first, group.last) for group in plan.groups]
        single = [(batch.first, batch.last) for batch in plan.batches if batch.group < 0]
        circle, most = Circle(values.data_ptr(), values.numel()), min(values.numel(), tree.numel())
        self._ranges = [self._range(*jobs, circle, most) for jobs in (*single, *groups)]
        self._first_group = len(single)

    def range_of(self, number: int) -> HashedTogether | None:
        """Return the jobs that are hashed together with those of a batch; None if there is no memory for their leaves."""
        group = self._plan.batches[number].group
        return self._ranges[number if group < 0 else self._first_group + group]

    def raw(self, read: ReadBatch, together: HashedTogether) -> RawLeaves:
        """Return how to hash the raw planes of a batch that has been read, in the order in which they are stored: packed ones
        after the others."""
        key, known = (read.lows, read.packed_at), self._raw.get(read.number)
        if known is None or known.key != key:
            known = self._raw[read.number] = self._raw_leaves(key, read, together)
        return known

    def _range(self, first: int, last: int, circle: Circle, most: int) -> HashedTogether | None:
        jobs = self._plan.jobs[first:last]
        counts, widths, planes = np.array([(leaf_count(job.nbytes), job.width, len(job.high)) for job in jobs], np.int64).T
        size = VALUE * int(counts.sum())
        whole = size + LEAF * int(widths.sum())
        if whole > most:
            return None
        address, after = circle.place(whole)
        return HashedTogether(
            first,
            Addressed(address, 0, self._device, torch.uint32),
            starts=np.cumsum(counts) - counts,
            joints=address + size + LEAF * (np.cumsum(widths) - widths),
            firsts=np.cumsum(planes) - planes,
            after=after,
        )

    def _raw_leaves(self, key: object, read: ReadBatch, together: HashedTogether) -> RawLeaves:
        batch = read.batch
        jobs, first = self._plan.jobs[batch.first : batch.last], batch.first - together.first
        planes, coded = jobs[0].low, jobs[0].coded
        addresses = self._plan.table[batch.first : batch.last, [2 + p for p in planes]]
        sizes, order = np.repeat([[job.plane] for job in jobs], len(planes), axis=1), [planes] * len(jobs)
        for i, (_, at, packed) in enumerate(read.lows):
            if packed:
                order[i] = (*planes[1:], 0)
                addresses[i] = (*addresses[i, 1:], read.packed_at + at)
                sizes[i, -1] = jobs[i].plane // 8 * 7
        some = np.flatnonzero([job.nbytes >= LEAST for job in jobs])
        leaves = Leaves(together.starts[first + some], together.joints[first + some], np.zeros_like(some))
        covers = [leaves.cover(addresses[some, i], sizes[some, i], last=not coded) for i in range(len(planes))]
        trees = np.empty((0, 4), np.int64) if coded else leaves.trees()
        return RawLeaves(key, some, leaves, order, HashTable(covers, trees, self._device))


def in_order(job: Job, low: tuple[int, ...], smaller: Sequence[bool]) -> bool:
    """Return whether the planes are stored in the order in which they are hashed: ``low`` and then the coded ones. A plane that
    coding did not make ``smaller`` is stored with the raw ones."""
    last = {p for p, less in zip(job.high, smaller, strict=True) if less} | ({0} if low != job.low else set())
    return sorted(range(job.width), key=lambda p: (p in last, p)) == [*low, *job.high]
