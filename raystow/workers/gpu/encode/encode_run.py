"""The schedule of one save on a GPU: what is read, coded and copied when.

It must never wait for one stage while another one could go on, and never announce chunks before all have been read: the training
waits for the reading, and shares the interpreter lock with this thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ...protocol.messages import CodedBatches, CodedPlanes
from ..encode_request import EncodeRequest
from .chunk_reader import ChunkReader
from .device_memory import EncoderResources
from .encode_plan import Batch, EncodePlan
from .group_coder import GroupCoder
from .hash_plan import HashPlan
from .host_copier import HostCopier
from .stages import Arrived, ReadBatch
from .stored_hasher import StoredHasher

Emit = Callable[[list[Arrived]], None]
"""Receives chunks that have arrived in host memory, in any order."""


_GATHERED = 3  # batches whose chunks are copied in device memory at a time, apart from the memory of the encoder


class EncodeRun:
    """Encodes the chunks of one request as planned. ``run`` is called once, then ``close``."""

    def __init__(
        self, plan: EncodePlan, hashing: HashPlan, request: EncodeRequest, resources: EncoderResources, emit: Emit
    ) -> None:
        self._plan, self._request, self._resources, self._emit = plan, request, resources, emit
        self.reader = ChunkReader(plan, request, resources.streams, resources.uploads)
        hasher = StoredHasher(plan, hashing, resources)
        self._coder = GroupCoder(plan, resources, hasher)
        self._copier = HostCopier(plan, request, resources, hasher, self._relieve)
        self._reads: deque[ReadBatch] = deque()
        self.copies: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()  # to the host, each with what follows
        self._copied: list[torch.cuda.Event] = []  # for each batch whose copy has begun, the event at its end
        self._complete_groups = 0  # in host memory
        self._all_read = False
        self._arrived: list[Arrived] = []

    def run(self) -> None:
        """Encode all chunks. Raises ``SaveFailed`` naming a tensor that was changed too early."""
        plan, request = self._plan, self._request
        for number, batch in enumerate(plan.batches):
            if number == plan.full:
                request.meanwhile()
            self._read(number, batch)
            self._advance()
        if plan.full == len(plan.batches):
            request.meanwhile()
        for read in self._reads:
            read.done.synchronize()
        self._all_read = True
        request.on_read()
        while self._reads or self._complete_groups < len(plan.groups) or self.copies:
            self._wait()
        self._flush()

    def close(self) -> None:
        """Free all memory, without waiting for the garbage collector. Nothing of the run may be in progress on the device."""
        self.copies.clear()  # both refer to this run
        del self._copier

    def _advance(self) -> bool:
        """Begin every stage whose input is complete, without waiting; return whether there was any."""
        advanced = False
        while self._reads and self._reads[0].done.query():
            self._copy_batch(self._reads.popleft())
            advanced = True
        if self._coder.running and self._coder.running.done.query():
            self._coder.finish()
            advanced = True
        if self._coder.ready:
            if self._coder.start():
                advanced = True
            elif self._coder.coded:
                self._copy_group()
                advanced = True
        while self.copies and self.copies[0][0].query():
            self._complete()
            advanced = True
        if self._coder.coded and (self._all_read or not self.copies):
            self._copy_group()
            advanced = True
        return advanced

    def _wait(self) -> None:
        """Wait for one stage, or use the time to announce what has arrived."""
        if self._advance():
            return
        if self._arrived and self._all_read:
            self._flush()
        elif self.copies:
            self._complete()
        elif self._reads:
            self._copy_batch(self._reads.popleft())
        else:
            self._coder.finish()

    def _read(self, number: int, batch: Batch) -> None:
        """Read a batch, once there is an event after which the memory for its planes is free."""
        while len(self._copied) < batch.after or len(self._coder.started) < batch.after_group:
            self._wait()
        while batch.scattered and sum(bool(read.copies) for read in self._reads) >= _GATHERED:
            self._wait()
        free = self._copied[batch.after - 1 : batch.after] if batch.after else []
        free += self._coder.started[batch.after_group - 1 : batch.after_group] if batch.after_group else []
        self._reads.append(self.reader.read(number, batch, free))

    def _copy_batch(self, read: ReadBatch) -> None:
        """Copy the raw planes of a batch to the host once it has been read, and add it to its group."""
        read.done.synchronize()
        read.copies.clear()
        self.reader.check(read)
        self._reserve_ring(read.batch)
        event = self._copier.copy_batch(read)
        self._copied.append(event)
        if read.batch.group >= 0:
            self._coder.add(read)

        def copied() -> None:
            if read.digests is not None:
                self._arrived.append(Arrived(read.runs, CodedBatches((read.message(),), digests=read.digests.packed())))

        self.copies.append((event, copied))

    def _copy_group(self) -> None:
        """Copy the oldest coded group to the host."""
        coded, codec = self._coder.coded.popleft(), self._resources.codec
        assert codec is not None
        assert coded.digests is not None
        run, event, digests = *self._copier.copy_group(coded), coded.digests

        def copied() -> None:
            self._resources.memory.dense.give_back()
            self._complete_groups += 1
            lengths = coded.results[0].numpy().astype("<i4").tobytes()
            planes = CodedPlanes(run, lengths, codec.name)
            message = CodedBatches(tuple(read.message() for read in coded.batches), planes, digests.packed())
            self._arrived.append(Arrived([run, *(run for read in coded.batches for run in read.runs)], message))

        self.copies.append((event, copied))

    def _reserve_ring(self, batch: Batch) -> None:
        """Free the ring until the raw planes of a batch leave enough of it for all coded planes in device memory.

        Raw planes stay in the ring until the coded planes of their chunks have arrived. If they filled it, no group could be
        copied, and the save would not go on.
        """
        memory, ring = self._resources.memory, self._resources.ring
        need = batch.low + batch.middle + memory.high_planes.numel() + memory.dense.size
        while self._complete_groups < batch.group and need > ring.room:
            if self._coder.coded:
                self._copy_group()
            elif self._coder.running:
                self._coder.finish()
            elif not (self._coder.ready and self._coder.start()):
                self._complete()
            self._flush()

    def _relieve(self) -> None:
        if self.copies:
            self._complete()
        self._flush()

    def _complete(self) -> None:
        """Wait for the oldest copy to the host."""
        event, copied = self.copies.popleft()
        event.synchronize()
        copied()

    def _flush(self) -> None:
        """Announce the chunks that have arrived."""
        arrived, self._arrived = self._arrived, []
        if arrived:
            self._emit(arrived)
