"""Codes groups of planes on the GPU, one group at a time, and concatenates the coded streams in device memory."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from ..kernel_args import part
from ..kernels import copy_kernels
from .device_memory import EncoderResources
from .encode_plan import EncodePlan
from .stages import CodedGroup, ReadBatch
from .stored_hasher import StoredHasher


class GroupCoder:
    """Codes the groups of a plan in their order, in one save.

    Attributes:
        started: For each group whose coding has begun the event after which it is coded.
        running: The group that is being coded.
        coded: Groups that are coded and have not been copied to the host yet, oldest first.
    """

    def __init__(self, plan: EncodePlan, resources: EncoderResources, hasher: StoredHasher) -> None:
        self._plan, self._codec, self._hasher = plan, resources.codec, hasher
        self._memory, self._stream = resources.memory, resources.streams.code
        self._batches: list[list[ReadBatch]] = [[] for _ in plan.groups]
        self.started: list[torch.cuda.Event] = []
        self.running: CodedGroup | None = None
        self.coded: deque[CodedGroup] = deque()

    def add(self, read: ReadBatch) -> None:
        """Add a batch that has been read to its group."""
        self._batches[read.batch.group].append(read)

    @property
    def ready(self) -> bool:
        """Whether the next group can be coded: its batches have been read, and no other group is being coded."""
        groups, number = self._plan.groups, len(self.started)
        return self.running is None and number < len(groups) and len(self._batches[number]) == groups[number].batches

    def start(self) -> bool:
        """Code the next group; return False if there is no dense memory for it now."""
        assert self._codec is not None
        number = len(self.started)
        group = self._plan.groups[number]
        start = self._memory.dense.take(group.nbytes)
        if start is None:
            return False
        cuts, n = self._plan.cuts_of(group), group.count
        with torch.cuda.stream(self._stream):
            results = torch.ones((2, n), dtype=torch.int64, device=self._plan.chunks.device)
            status, scratch = results[1].view(torch.int32)[:n], self._memory.scratch
            targets, sizes = (part(one, 0, n) for one in (self._memory.targets, self._memory.sizes))
            self._codec.compress(*cuts, targets, sizes, scratch=scratch, status=status)
            base = self._memory.dense.memory.data_ptr() + start
            streams = copy_kernels.CodedStreams(self._memory.out, self._codec.stride, sizes)
            copy_kernels.condense(group.owners, cuts, streams, base, largest=group.largest, lengths=results[0])
            found = copy_kernels.to_host(results)
            event = self._stream.record_event()
        self.started.append(event)
        self.running = CodedGroup(group, self._batches[number], start, found, event)
        return True

    def finish(self) -> None:
        """Wait until the running group is coded, free the dense memory that it does not need, and hash what it has."""
        coded, self.running = self.running, None
        assert coded is not None
        coded.done.synchronize()
        lengths, codes = coded.results.numpy()
        status = codes.view(np.int32)[: len(lengths)]
        if status.any():
            raise RuntimeError(
                f"nvCOMP could not code {np.count_nonzero(status)} of {len(lengths)} streams (code {status.max()})"
            )
        coded.size = int(lengths.sum())
        self._memory.dense.shrink(coded.size)
        coded.digests = self._hasher.finish(coded)
        self.coded.append(coded)
