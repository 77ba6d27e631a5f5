"""Copies chunks in host memory to a GPU: from pinned memory directly, from other memory through a pinned buffer."""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from ...state.chunk_info import HOST_CHUNK
from ...storage.coding import kernels
from ...storage.coding.kernels import Bytes
from .encode_request import Source
from .pinned_memory import BUFFERS, PinnedMemory

_PAGES, _PAGE = 4, 8 * HOST_CHUNK  # pages of the pinned buffer, and bytes of each
_ALIGN = 512  # bytes
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


@dataclass
class _Page:
    """Chunks that are copied to a page of the pinned buffer, one after the other. ``start``: their place in the memory of the
    device; ``used``: their bytes."""

    number: int
    start: int
    used: int = 0
    fills: list[Future[None]] = field(default_factory=list)


class Uploads:
    """Copies chunks to ``device``. Threads fill pages of the pinned buffer while earlier ones are on their way. A page is copied
    by one launch: each takes as long as the copy of megabytes, and this thread fills no pages meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: PinnedMemory | None = None
        self._next = 0
        self._sent: list[torch.cuda.Event | None] = [None] * _PAGES

    def gathered(self, sources: Sequence[Source]) -> list[torch.Tensor]:
        """Return contiguous copies of chunks as they are stored, made on the current stream of the device."""
        copies = iter(self.words([source for source in sources if source.on_host]))
        return [source.gather(next(copies)) if source.on_host else source.gather() for source in sources]

    def words(self, sources: Sequence[Source]) -> list[torch.Tensor]:
        """Return the words of chunks in host memory, uint8 each, on the device when the current stream has come so far."""
        ends = list(itertools.accumulate(-(-source.nbytes // _ALIGN) * _ALIGN for source in sources))
        memory = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, device=self._device)
        copies, filling = list[torch.Tensor](), deque[_Page]()
        try:
            for source, start, end in zip(sources, [0, *ends], ends, strict=False):
                copies.append(memory[start : start + source.nbytes])
                words = source.host_words()
                if words.flags.c_contiguous and (flat := torch.from_numpy(words.reshape(-1).view(np.uint8))).is_pinned():
                    copies[-1].copy_(flat, non_blocking=True)
                    continue
                if not filling or start != filling[-1].start + filling[-1].used or end - filling[-1].start > _PAGE:
                    if len(filling) == _PAGES:
                        self._send(filling, memory)
                    filling.append(self._free_page(start))
                page = filling[-1]
                place = self._bytes(page)[page.used :][: source.nbytes]
                page.used = end - page.start
                page.fills.append(_threads().submit(kernels.copy, words, place))
            while filling:
                self._send(filling, memory)
        finally:  # after an error, no thread may write into a page that the next call fills
            for page in filling:
                for fill in page.fills:
                    fill.exception()
        return copies

    def close(self) -> None:
        """Give the buffer back; copies must have ended."""
        if self._buffer is not None:
            BUFFERS.give_back(self._buffer)
        self._buffer, self._sent = None, [None] * _PAGES

    def _send(self, filling: deque[_Page], memory: torch.Tensor) -> None:
        """Launch the copy of the oldest page to the device."""
        page = filling[0]
        for fill in page.fills:
            fill.result()
        filling.popleft()
        memory[page.start :][: page.used].copy_(torch.from_numpy(self._bytes(page)[: page.used]), non_blocking=True)
        self._sent[page.number] = torch.cuda.current_stream(self._device).record_event()

    def _free_page(self, start: int) -> _Page:
        """Return the next page, when it has been copied."""
        number, self._next = self._next, (self._next + 1) % _PAGES
        if (sent := self._sent[number]) is not None:
            sent.synchronize()
        return _Page(number, start)

    def _bytes(self, page: _Page) -> Bytes:
        if self._buffer is None:
            self._buffer = BUFFERS.take(_PAGES * _PAGE)
            self._buffer.wait(0)
        return self._buffer.memory[page.number * _PAGE :][:_PAGE]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that fill slots. They end when the process does."""
    return ThreadPoolExecutor(_THREADS, "raystow-upload")
