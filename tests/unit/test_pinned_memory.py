"""One thread pins host memory ahead of its use, and several threads pin it once a thread waits for the memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from polling import wait_until

from raystow.workers.gpu import pinned_memory
from raystow.workers.gpu.pinned_memory import PinnedMemory

PART = 1 << 12


class Pinning:
    """A replacement of ``_pin`` that counts concurrent threads. Each call waits for ``allowed``, except for parts in ``free``."""

    def __init__(self) -> None:
        self.allowed, self.free = threading.Event(), set[int]()
        self.parts: list[int] = []
        self._changed = threading.Condition()
        self._now = self._most = 0

    def __call__(self, memory: np.ndarray) -> int:
        with self._changed:
            self.parts.append(int(memory[0]))
            self._now += 1
            self._most = max(self._most, self._now)
            self._changed.notify_all()
        assert int(memory[0]) in self.free or self.allowed.wait(30)
        with self._changed:
            self._now -= 1
        return 0

    def threads(self, least: int, patience: float) -> int:
        """Wait until ``least`` threads pin concurrently. Return the largest number so far."""
        with self._changed:
            self._changed.wait_for(lambda: self._most >= least, patience)
            return self._most


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Pinning:
    made = Pinning()
    monkeypatch.setattr(pinned_memory, "_pin", made)
    monkeypatch.setattr(pinned_memory, "_THREADS", 4)
    return made


def memory(parts: int) -> np.ndarray:
    return np.arange(parts, dtype=np.uint8).repeat(PART)


def test_one_thread_pins_until_another_thread_waits(pinning: Pinning) -> None:
    pinned = PinnedMemory(memory(9), PART, ahead=True)
    assert pinning.threads(2, patience=0.2) == 1
    waiting = threading.Thread(target=pinned.wait, args=(8 * PART,))
    waiting.start()
    assert pinning.threads(4, patience=30) >= 4
    pinning.allowed.set()
    waiting.join()
    for part in range(9):
        pinned.wait(part * PART)
    assert sorted(pinning.parts) == list(range(9)), "each part is pinned once"
    pinned.close()


def test_a_wait_for_a_pinned_part_starts_no_more_threads(pinning: Pinning) -> None:
    pinning.free.add(0)
    pinned = PinnedMemory(memory(9), PART, ahead=True)
    wait_until(lambda: len(pinning.parts) == 2, "the first part is pinned")
    pinned.wait(0)
    assert pinning.threads(2, patience=0.2) == 1
    pinning.allowed.set()
    pinned.wait(8 * PART)
    pinned.close()


def test_several_threads_pin_a_buffer_that_is_needed_now(pinning: Pinning) -> None:
    pinned = PinnedMemory(memory(4), PART)
    assert pinning.threads(4, patience=30) == 4
    pinning.allowed.set()
    pinned.wait(3 * PART)
    pinned.close()
