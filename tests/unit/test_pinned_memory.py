"""Host memory is pinned by one thread ahead of its use, and by several once somebody waits for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from polling import wait_until

from raystow.workers.gpu import pinned_memory
from raystow.workers.gpu.pinned_memory import PinnedMemory

PART = 1 << 12


class Pinning:
    """Stands for ``_pin``: counts the threads that pin at a time. Each waits for ``allowed``, but not for parts in ``free``."""

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
        """Wait until so many threads pin at a time; return the most that did."""
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


def test_one_thread_pins_until_somebody_waits(pinning: Pinning) -> None:
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


def test_a_part_that_is_pinned_hurries_no_other(pinning: Pinning) -> None:
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
