"""Copies planes from device memory to the pinned ring."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from ..encode_request import EncodeRequest
from .device_memory import EncoderResources
from .encode_plan import EncodePlan
from .pack7 import worth_packing
from .pinned_ring import RingRun
from .stages import CodedGroup, ReadBatch
from .stored_hasher import StoredHasher


class HostCopier:
    """Copies the planes of one save, and lets the hasher read them before their memory is used again.

    ``relieve`` is called while the ring has no free slot; it must announce chunks that have arrived.
    """

    def __init__(
        self,
        plan: EncodePlan,
        request: EncodeRequest,
        resources: EncoderResources,
        hasher: StoredHasher,
        relieve: Callable[[], None],
    ) -> None:
        self._plan, self._request, self._hasher, self._relieve = plan, request, hasher, relieve
        self._memory, self._streams, self._ring = resources.memory, resources.streams, resources.ring

    def copy_batch(self, read: ReadBatch) -> torch.cuda.Event:
        """Copy the raw planes of a batch, the lowest ones packed if possible; return the event after which they are copied, and
        hashed."""
        batch, copy, packed = read.batch, self._streams.copy, None
        odds = read.found[2].tolist()
        with torch.cuda.stream(copy):
            if batch.rotate and worth_packing(self._plan.jobs[batch.first : batch.last], batch.low, odds):
                packed = self._copy_packed(read, odds)
            elif batch.low + batch.middle:
                copy.wait_event(read.done)
                read.runs.append(self._ring.write(batch.base, batch.low + batch.middle, self._relieve))
            copied = copy.record_event()
        done = self._hasher.add(read, packed, copied)
        if packed is not None:
            self._memory.pack_buffers.copied(done)
        return done

    def copy_group(self, coded: CodedGroup) -> tuple[RingRun, torch.cuda.Event]:
        """Copy a coded group; return its place and the event after which it is copied, and hashed."""
        assert coded.digests is not None
        with torch.cuda.stream(self._streams.copy):
            run = self._ring.write(self._memory.dense.memory.data_ptr() + coded.start, coded.size, self._relieve)
            self._streams.copy.wait_event(coded.digests.done)
            return run, self._streams.copy.record_event()

    def _copy_packed(self, read: ReadBatch, odds: list[int]) -> torch.cuda.Event | None:
        """Copy the raw planes of a batch of which some lowest planes can be packed, in several runs; return the event after which
        they are packed."""
        batch, streams, buffers = read.batch, self._streams, self._memory.pack_buffers
        jobs, starts = self._plan.jobs[batch.first : batch.last], self._plan.starts[batch.first : batch.last].tolist()
        planes, packed = buffers.plan(jobs, starts, odds, batch.base), None
        if planes.rows:
            stream = streams.urgent if self._request.urgent() else streams.pack
            stream.wait_event(read.done)
            packed = buffers.pack(planes, stream)
        streams.copy.wait_event(read.done)
        if batch.middle:
            read.runs.append(self._ring.write(batch.base + batch.low, batch.middle, self._relieve))
        packed_run = len(read.runs)
        if packed is not None:
            streams.copy.wait_event(packed)
            read.packed_at = buffers.current.data_ptr()
            read.runs.append(self._ring.write(read.packed_at, planes.nbytes, self._relieve))
        for raw, group in itertools.groupby(zip(jobs, starts, planes.places, strict=True), lambda row: row[2] is None):
            rows = list(group)
            if raw:
                first, end = rows[0][1], rows[-1][1] + rows[-1][0].padded
                read.lows += [(len(read.runs), start - first, False) for _, start, _ in rows]
                read.runs.append(self._ring.write(batch.base + first, end - first, self._relieve))
            else:
                read.lows += [(packed_run, place, True) for _, _, place in rows if place is not None]
        return packed
