"""Entries pass between a training process and its node worker through memory that both have mapped."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from raystow.storage.errors import ProtocolError
from raystow.workers.journal import entry_bytes
from raystow.workers.journal.entry_bytes import SharedBuffer, SharedMemories
from raystow.workers.shm.anonymous_memory import AnonymousMemory

KIB = 1 << 10
DATA = os.urandom(300 * KIB)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the limits, so that small entries are handled like large ones."""
    monkeypatch.setattr(entry_bytes, "_PIECE", 16 * KIB)
    monkeypatch.setattr(entry_bytes, "_GROWTH", 64 * KIB)


@pytest.fixture
def node() -> SharedMemories:
    return SharedMemories()


@pytest.fixture
def buffer(node: SharedMemories) -> Iterator[SharedBuffer]:
    """Memory that the node knows as number 7."""
    with closing(SharedBuffer(lambda memory: node.share(7, memory.size, memory.lend()))) as found:
        yield found


def fill(buffer: SharedBuffer, data: bytes) -> memoryview:
    """Put a part of an entry into memory."""
    part = buffer.take(len(data))
    part[:] = np.frombuffer(data, np.uint8)
    return part.data


@pytest.mark.parametrize("cuts", [(), (1,), (5 * KIB, 100 * KIB + 3), (5 * KIB, 5 * KIB)])
def test_the_node_gets_the_parts_in_order(node: SharedMemories, buffer: SharedBuffer, cuts: tuple[int, ...]) -> None:
    """Some parts were put into the memory before it grew, and others elsewhere. It is used for two entries."""
    for data in (DATA, DATA[::-1]):
        buffer.clear()
        parts = [data[first:last] for first, last in itertools.pairwise([0, *cuts, len(data)])]
        placed = [fill(buffer, part) if number % 2 else part for number, part in reversed([*enumerate(parts)])]
        assert node.gathered(7, buffer.spans(placed[::-1]), len(data)).tobytes() == data


def test_the_node_keeps_a_copy(node: SharedMemories, buffer: SharedBuffer) -> None:
    copied = node.gathered(7, buffer.spans([fill(buffer, DATA)]), len(DATA))
    buffer.clear()
    fill(buffer, bytes(len(DATA)))
    assert copied.tobytes() == DATA


def test_an_entry_is_put_into_memory(node: SharedMemories, buffer: SharedBuffer) -> None:
    target = buffer.take(len(DATA))
    node.put(7, DATA)
    assert target.tobytes() == DATA


@pytest.mark.parametrize(
    ("number", "spans", "size"),
    [(6, [(0, 10)], 10), (7, [(0, 10)], 11), (7, [(0, 64 * KIB + 1)], 64 * KIB + 1), (7, [(-10, 10)], 20), (7, [(20, 10)], 10)],
)
def test_spans_outside_of_the_memory_are_refused(
    node: SharedMemories, buffer: SharedBuffer, number: int, spans: list[tuple[int, int]], size: int
) -> None:
    buffer.take(10)
    with pytest.raises(ProtocolError, match="shared"):
        node.gathered(number, spans, size)


def test_an_entry_that_is_too_large_is_not_put_into_memory(node: SharedMemories, buffer: SharedBuffer) -> None:
    buffer.take(10)
    with pytest.raises(ProtocolError, match="does not fit"):
        node.put(7, DATA)


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="came in memory of"):
        AnonymousMemory.received(AnonymousMemory.empty(10).lend(), 11)


def test_memory_that_cannot_be_sealed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    with pytest.raises(ProtocolError, match="cannot be sealed"):
        AnonymousMemory.received(os.open(tmp_path / "file", os.O_RDWR), len(DATA))


def test_received_memory_cannot_be_made_smaller() -> None:
    """A process that reads a mapping of it would be killed."""
    with (
        closing(AnonymousMemory.empty(10)) as memory,
        closing(AnonymousMemory.received(memory.lend(), 10)) as received,
    ):
        with pytest.raises(PermissionError):
            memory.grow(1)
        memory.grow(20)
        assert len(received.content) == 10
