"""Copies chunks in host memory to a GPU: from pinned memory directly, from other memory through a pinned buffer."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ...state.chunk_info import HOST_CHUNK
from ...storage.coding import kernels
from ...storage.coding.kernels import Bytes
from .encode_request import Source
from .pinned_memory import BUFFERS, PinnedMemory

_SLOTS = 32
_PINNED = _SLOTS * HOST_CHUNK  # bytes
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


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
        copies, filling = list[torch.Tensor](), deque[tuple[Bytes, int, Future[None] | None]]()
        try:
            for source in sources:
                words = source.host_words()
                if words.flags.c_contiguous and (flat := torch.from_numpy(words.reshape(-1).view(np.uint8))).is_pinned():
                    filling.append((flat.numpy(), -1, None))
                else:
                    while sum(slot >= 0 for _, slot, _ in filling) == _SLOTS:
                        copies.append(self._send(*filling.popleft()))
                    slot = self._free_slot()
                    place = self._slot(slot)[: source.nbytes]
                    filling.append((place, slot, _threads().submit(kernels.copy, words, place)))
                while filling and (filling[0][2] is None or filling[0][2].done()):
                    copies.append(self._send(*filling.popleft()))
            while filling:
                copies.append(self._send(*filling.popleft()))
        finally:  # after an error, no thread may write into a slot that the next call fills
            for _, _, filled in filling:
                if filled is not None:
                    filled.exception()
        return copies

    def close(self) -> None:
        """Give the buffer back; copies must have ended."""
        if self._buffer is not None:
            BUFFERS.give_back(self._buffer)
        self._buffer, self._sent = None, [None] * _SLOTS

    def _send(self, place: Bytes, slot: int, filled: Future[None] | None) -> torch.Tensor:
        """Launch the copy of a chunk to the device."""
        if filled is not None:
            filled.result()
        copy = torch.empty(place.size, dtype=torch.uint8, device=self._device)
        copy.copy_(torch.from_numpy(place), non_blocking=True)
        if slot >= 0:
            self._sent[slot] = torch.cuda.current_stream(self._device).record_event()
        return copy

    def _free_slot(self) -> int:
        """Return the next slot, when it has been copied."""
        slot, self._next = self._next, (self._next + 1) % _SLOTS
        if (sent := self._sent[slot]) is not None:
            sent.synchronize()
        return slot

    def _slot(self, number: int) -> Bytes:
        if self._buffer is None:
            self._buffer = BUFFERS.take(_PINNED)
            self._buffer.wait(0)
        return self._buffer.memory[number * HOST_CHUNK : (number + 1) * HOST_CHUNK]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that fill slots. They end when the process does."""
    return ThreadPoolExecutor(_THREADS, "raystow-upload")
