"""Copies chunks in host memory to a GPU: from pinned memory directly, from other memory through a pinned buffer."""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from ...state.chunk_info import HOST_CHUNK
from ...storage.coding import kernels
from ...storage.coding.kernels import Bytes
from .encode_request import Source
from .pinned_memory import BUFFERS, PinnedMemory

_SLOTS = 32
_PINNED = _SLOTS * HOST_CHUNK  # bytes
_RUN = 8  # slots that one launch copies
_ALIGN = 512  # bytes
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


class _Filling(NamedTuple):
    """A chunk that is copied to a slot of the pinned buffer. ``start``: its place in the memory of the device."""

    slot: int
    start: int
    nbytes: int
    filled: Future[None]


class Uploads:
    """Copies chunks to ``device``. Threads fill the slots of the pinned buffer while earlier ones are on their way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: PinnedMemory | None = None
        self._next = 0
        self._sent: list[torch.cuda.Event | None] = [None] * _SLOTS

    def gathered(self, sources: Sequence[Source]) -> list[torch.Tensor]:
        """Return contiguous copies of chunks as they are stored, made on the current stream of the device."""
        copies = iter(self.words([source for source in sources if source.on_host]))
        return [source.gather(next(copies)) if source.on_host else source.gather() for source in sources]

    def words(self, sources: Sequence[Source]) -> list[torch.Tensor]:
        """Return the words of chunks in host memory, uint8 each, on the device when the current stream has come so far."""
        ends = list(itertools.accumulate(-(-source.nbytes // _ALIGN) * _ALIGN for source in sources))
        memory = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, device=self._device)
        copies, filling = list[torch.Tensor](), deque[_Filling]()
        try:
            for source, start in zip(sources, [0, *ends], strict=False):
                copies.append(memory[start : start + source.nbytes])
                words = source.host_words()
                if words.flags.c_contiguous and (flat := torch.from_numpy(words.reshape(-1).view(np.uint8))).is_pinned():
                    copies[-1].copy_(flat, non_blocking=True)
                    continue
                if len(filling) == _SLOTS:
                    self._send(filling, memory)
                slot = self._free_slot()
                place = self._slots()[slot * HOST_CHUNK :][: source.nbytes]
                filling.append(_Filling(slot, start, source.nbytes, _threads().submit(kernels.copy, words, place)))
            while filling:
                self._send(filling, memory)
        finally:  # after an error, no thread may write into a slot that the next call fills
            for one in filling:
                one.filled.exception()
        return copies

    def close(self) -> None:
        """Give the buffer back; copies must have ended."""
        if self._buffer is not None:
            BUFFERS.give_back(self._buffer)
        self._buffer, self._sent = None, [None] * _SLOTS

    def _send(self, filling: deque[_Filling], memory: torch.Tensor) -> None:
        """Launch one copy to the device, of the oldest chunk and of those that follow it in the buffer and in ``memory``: each
        launch takes as long as the copy of a megabyte, in which this thread fills no slots."""
        first = last = filling[0]
        first.filled.result()
        run = [filling.popleft()]
        while filling and len(run) < _RUN and filling[0][:2] == (last.slot + 1, last.start + HOST_CHUNK):
            filling[0].filled.result()
            run.append(last := filling.popleft())
        size, begin = last.start + last.nbytes - first.start, first.slot * HOST_CHUNK
        memory[first.start :][:size].copy_(torch.from_numpy(self._slots()[begin : begin + size]), non_blocking=True)
        sent = torch.cuda.current_stream(self._device).record_event()
        for one in run:
            self._sent[one.slot] = sent

    def _free_slot(self) -> int:
        """Return the next slot, when it has been copied."""
        slot, self._next = self._next, (self._next + 1) % _SLOTS
        if (sent := self._sent[slot]) is not None:
            sent.synchronize()
        return slot

    def _slots(self) -> Bytes:
        """The pinned buffer: slots of ``HOST_CHUNK`` bytes."""
        if self._buffer is None:
            self._buffer = BUFFERS.take(_PINNED)
            self._buffer.wait(0)
        return self._buffer.memory


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that fill slots. They end when the process does."""
    return ThreadPoolExecutor(_THREADS, "raystow-upload")
