"""A circular allocator: regions are freed in the order in which they were allocated."""

from __future__ import annotations

from collections import deque

import torch


class Arena:
    """Allocates contiguous regions of ``memory`` (uint8)."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._taken: deque[tuple[int, int]] = deque()  # start and end of each region, oldest first

    @property
    def size(self) -> int:
        return int(self.memory.numel())

    def take(self, nbytes: int) -> int | None:
        """Return the start of a new region of ``nbytes``, or None until older ones are freed."""
        nbytes = max(1, -(-nbytes // 512)) * 512
        if not self._taken:
            start = 0
        else:
            head, tail = self._taken[0][0], self._taken[-1][1]
            wrapped = tail <= head
            if not wrapped and tail + nbytes > self.size:
                if nbytes >= head:  # equality would make a full arena look empty
                    return None
                start = 0
            elif wrapped and tail + nbytes >= head:
                return None
            else:
                start = tail
        if start + nbytes > self.size:
            return None
        self._taken.append((start, start + nbytes))
        return start

    def shrink(self, nbytes: int) -> None:
        """Free all but the first ``nbytes`` of the newest region."""
        start, end = self._taken.pop()
        self._taken.append((start, min(end, start + max(1, -(-nbytes // 512)) * 512)))

    def give_back(self) -> None:
        """Free the oldest region."""
        self._taken.popleft()

    def clear(self) -> None:
        """Free all regions."""
        self._taken.clear()
