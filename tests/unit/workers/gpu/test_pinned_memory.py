"""One thread pins host memory ahead of its use, and several threads pin it once a thread waits for the memory. Each part that was
pinned is unpinned once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.polling import wait_until
from helpers.replaced_parts import replace_parts

from raystow.storage.errors import ClusterError
from raystow.workers.gpu import pinned_memory
from raystow.workers.gpu.decode import lane
from raystow.workers.gpu.pinned_memory import HostBuffers, PinnedMemory

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
    replace_parts(monkeypatch, [(pinned_memory, "_pin", made), (pinned_memory, "_THREADS", 4)])
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


class Registry:
    """CUDA's registry of pinned memory. ``codes``: the errors of the next calls."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.codes: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.sizes
        if code := self.codes.pop(0) if self.codes else 0:
            return code
        self.sizes[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.sizes[address]
        return 0


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    devices = SimpleNamespace(device_count=lambda: 0, device=lambda index: contextlib.nullcontext())
    cuda = SimpleNamespace(is_available=lambda: True, cudart=lambda: made, **vars(devices))
    replace_parts(monkeypatch, [(torch, "cuda", cuda)])
    return made


def test_memory_that_nobody_closes_is_unpinned(registry: Registry) -> None:
    pinned = PinnedMemory(memory(4), PART)
    pinned.wait(3 * PART)
    wait_until(lambda: len(registry.sizes) == 4, "all parts are pinned")
    del pinned
    wait_until(lambda: not registry.sizes, "they are unpinned")
    closed = PinnedMemory(memory(4), PART)
    closed.close()
    assert not registry.sizes
    del closed


def test_buffers_that_could_not_be_pinned_are_not_kept(registry: Registry) -> None:
    registry.codes, buffers = [2], HostBuffers()
    broken = buffers.take(PART)
    with pytest.raises(ClusterError, match="cannot pin"):
        broken.wait(0)
    buffers.give_back(broken)
    whole = buffers.take(PART)
    whole.wait(0)
    buffers.give_back(whole)
    assert buffers.take(PART) is whole
    whole.close()


def allocate_by(
    patch: pytest.MonkeyPatch, *, empty: Callable[..., Any], stream: Callable[..., Any], take: Callable[[int], Any]
) -> None:
    """Let a lane allocate its tensors, its stream and its buffers by these functions."""
    replace_parts(patch, [(torch, "empty", empty), (torch.cuda, "Stream", stream), (lane.BUFFERS, "take", take)])


def test_a_lane_without_device_memory_takes_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, taken = SimpleNamespace(record_event=lambda: None), list[int]()

    def full(*args: object, **how: object) -> None:
        raise torch.OutOfMemoryError

    allocate_by(monkeypatch, empty=full, stream=lambda device: stream, take=taken.append)
    with pytest.raises(torch.OutOfMemoryError):
        lane.Lane(torch.device("cuda"))
    assert not taken


def test_a_lane_that_cannot_grow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder may be used again after an error, and kernels write as many numbers as its lanes have on the host."""
    empty, full = torch.empty, threading.Event()

    def limited(count: int, *, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        if full.is_set() and not pin_memory:
            raise torch.OutOfMemoryError
        return empty(count, **how)

    stream, host = SimpleNamespace(record_event=lambda: None), SimpleNamespace(memory=memory(1))
    allocate_by(monkeypatch, empty=limited, stream=lambda device: stream, take=lambda nbytes: host)
    made = lane.Lane(torch.device("cpu"))
    count = len(made.numbers)
    full.set()
    with pytest.raises(torch.OutOfMemoryError):
        made.reserve(numbers=2 * count)
    assert len(made.numbers) == count
