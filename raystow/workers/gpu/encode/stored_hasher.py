"""Computes the digests of what is stored of chunks, while it is in device memory, so that no CPU has to read it.

The leaves of planes that are not coded are hashed as soon as a batch has been read, because its memory is needed again; those of
coded planes, and the trees, when their group has been coded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .device_memory import EncoderResources
from .encode_plan import EncodePlan
from .hash_plan import HashedTogether, HashPlan, HashTable, Leaves, RawLeaves, in_order
from .stages import CodedGroup, ReadBatch, TakenDigests

Hashed = tuple[npt.NDArray[np.int64], HashTable]
"""The chunks of a range that are hashed, by their position in it, and the table of their trees."""


class StoredHasher:
    """Hashes the chunks of one save. One stream does everything, so memory for values can be reused at once."""

    def __init__(self, plan: EncodePlan, hashing: HashPlan, resources: EncoderResources) -> None:
        self._plan, self._hashing = plan, hashing
        self._memory, self._stream = resources.memory, resources.streams.hash
        self._device = plan.chunks.device
        self._raw = dict[int, RawLeaves]()  # of batches whose groups are not complete, by number
        self._complete = 0  # ranges that have digests

    def add(self, read: ReadBatch, packed: torch.cuda.Event | None, copied: torch.cuda.Event) -> torch.cuda.Event:
        """Hash the planes of a batch that are not coded; return the event after which they are hashed and copied.

        Args:
            packed: The event after which its lowest planes are packed, if some are.
            copied: The event after which the planes are copied.
        """
        together, batch = self._hashing.range_of(read.number), read.batch
        with torch.cuda.stream(self._stream):
            if packed is not None:
                self._stream.wait_event(packed)
            raw = None
            if together is not None and together.after <= self._complete:
                raw = self._hashing.raw(read, together)
                raw.table.hash(together.values)
            if batch.group < 0:
                read.digests = self._digests(together, batch.last - batch.first, (raw.places, raw.table) if raw else None)
            elif raw:
                self._raw[read.number] = raw
            self._stream.wait_event(copied)
            return self._stream.record_event()

    def finish(self, coded: CodedGroup) -> TakenDigests:
        """Hash the coded planes of a group, and compute the digests of its chunks."""
        numbers = [read.number for read in coded.batches]
        together, raws = self._hashing.range_of(numbers[0]), [self._raw.pop(number, None) for number in numbers]
        with torch.cuda.stream(self._stream):
            hashed = None
            if together is not None and None not in raws:
                hashed = self._hash_coded(coded, together, [raw for raw in raws if raw is not None])
            return self._digests(together, coded.group.last - coded.group.first, hashed)

    def _hash_coded(self, coded: CodedGroup, together: HashedTogether, raws: list[RawLeaves]) -> Hashed:
        """Hash the coded planes of a group, after the others."""
        group, lengths = coded.group, coded.results[0].numpy()
        sizes = np.add.reduceat(lengths, group.starts)  # of each plane
        smaller, totals = sizes < group.planes, np.add.reduceat(sizes, together.firsts)
        addresses = self._memory.dense.memory.data_ptr() + coded.start + np.cumsum(totals) - totals
        firsts = [read.batch.first - group.first for read in coded.batches]
        places = np.concatenate([first + raw.places for first, raw in zip(firsts, raws, strict=True)])
        leaves = Leaves.joined([raw.leaves for raw in raws])
        if not smaller.all():
            low = [planes for raw in raws for planes in raw.order]
            planes = np.split(smaller, together.firsts[1:])
            right = [in_order(self._plan.jobs[group.first + i], low[i], planes[i].tolist()) for i in places.tolist()]
            places, leaves = places[right], leaves.some(right)
        table = HashTable([leaves.cover(addresses[places], totals[places], last=True)], leaves.trees(), self._device)
        table.hash(together.values)
        return places, table

    def _digests(self, together: HashedTogether | None, chunks: int, hashed: Hashed | None) -> TakenDigests:
        """Compute the digests of the chunks that are hashed here."""
        self._complete += together is not None
        if together is None or hashed is None:
            return TakenDigests(
                chunks, np.empty(0, np.int64), torch.empty((0, 4), dtype=torch.int64), self._stream.record_event()
            )
        places, table = hashed
        found = table.digests(together.values, self._hashing.tree)
        return TakenDigests(chunks, places, found, self._stream.record_event())
