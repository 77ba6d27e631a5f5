"""Entries pass between a training process and its node worker through memory that both have mapped."""

from __future__ import annotations

import itertools
import os
from contextlib import closing
from pathlib import Path

import pytest

from raystow.storage.errors import ProtocolError
from raystow.workers.journal.entry_bytes import ArrivingEntry, SharedMemories
from raystow.workers.shm.anonymous_memory import AnonymousMemory

KIB = 1 << 10
DATA = os.urandom(20_000 * KIB)  # more than one thread copies at a time


def shared(data: bytes = DATA) -> SharedMemories:
    """Return a node worker's memories, of which number 7 has this data."""
    memories = SharedMemories()
    with closing(AnonymousMemory.empty(len(data))) as memory:
        memory.target[:] = data
        memories.share(7, memory.size, memory.lend())
    return memories


@pytest.mark.parametrize("cuts", [(), (1,), (5 * KIB, 100 * KIB + 3), (5 * KIB, 5 * KIB)])
def test_an_entry_arrives_part_by_part(cuts: tuple[int, ...]) -> None:
    """It may be as long as announced, or shorter."""
    spans = list(itertools.pairwise([0, *cuts, len(DATA)]))
    for most in (len(DATA), 1 << 30):
        entry, memories = ArrivingEntry(most), shared()
        entry.append(memories.parts(7, spans[:1]))
        entry.append(memories.parts(7, spans[1:]))
        assert entry.size == len(DATA)
        assert entry.content() == DATA


def test_the_node_keeps_a_copy() -> None:
    entry, memories = ArrivingEntry(len(DATA)), shared()
    entry.append(memories.parts(7, [(0, len(DATA))]))
    memories.put(7, bytes(len(DATA)))
    assert entry.content() == DATA


def test_no_more_bytes_arrive_than_were_announced() -> None:
    entry, memories = ArrivingEntry(10), shared()
    entry.append(memories.parts(7, [(0, 6)]))
    with pytest.raises(ProtocolError, match="at most 10 were announced"):
        entry.append(memories.parts(7, [(6, 11)]))


def test_a_refused_entry_takes_no_more_memory() -> None:
    """Its other bytes are counted only."""
    entry, memories = ArrivingEntry(1 << 30, lambda size: "is full" if size > 1000 else ""), shared()
    for first in (0, 1000, 2000):
        entry.append(memories.parts(7, [(first, first + 1000)]))
        assert (entry.problem, entry._bytes.size) == (("", 1 << 30) if first == 0 else ("is full", 0))
    assert entry.size == 3000
    with pytest.raises(ProtocolError, match="were announced"):
        entry.append(memories.parts(7, [(0, len(DATA))] * 4000))


def test_an_entry_is_put_into_memory() -> None:
    memories = shared(bytes(len(DATA)))
    memories.put(7, DATA[:-5])
    (found,) = memories.parts(7, [(0, len(DATA))])
    assert found.tobytes() == DATA[:-5] + bytes(5)


@pytest.mark.parametrize(("number", "span"), [(6, (0, 10)), (7, (0, len(DATA) + 1)), (7, (-10, 10)), (7, (20, 10))])
def test_spans_outside_of_the_memory_are_refused(number: int, span: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError, match="shared"):
        shared().parts(number, [(0, 1), span])


def test_an_entry_that_is_too_large_is_not_put_into_memory() -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        shared(b"12").put(7, b"123")


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
