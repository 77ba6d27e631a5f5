"""The memory of an entry is filled by several threads, and the memory of the next entry is prepared."""

from __future__ import annotations

import itertools
import os
from contextlib import closing
from pathlib import Path

import pytest
from polling import wait_until

from raystow.storage.errors import ProtocolError
from raystow.workers.journal import entry_memory
from raystow.workers.journal.entry_memory import EntryMemory, SpareMemory

KIB = 1 << 10
DATA = os.urandom(300 * KIB)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the limits, so that small entries are handled like large ones."""
    monkeypatch.setattr(entry_memory, "_PIECE", 16 * KIB)
    monkeypatch.setattr(entry_memory, "_PREPARED", 32 * KIB)
    monkeypatch.setattr(entry_memory, "_WORTH", 64 * KIB)


def pages(memory: EntryMemory) -> int:
    """Return the number of bytes that the system has allocated for the memory."""
    descriptor = memory.lend()
    try:
        return 512 * os.fstat(descriptor).st_blocks
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("cuts", [(), (1,), (5 * KIB, 100 * KIB + 3)])
def test_parts_are_stored_in_order(cuts: tuple[int, ...]) -> None:
    ends = [0, *cuts, len(DATA)]
    memory = EntryMemory.of([DATA[first:last] for first, last in itertools.pairwise(ends)], len(DATA))
    content = memory.content
    memory.close()
    assert content == DATA


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="came in memory of"):
        EntryMemory.received(EntryMemory.of([DATA], len(DATA)).lend(), len(DATA) + 1)


def test_memory_that_cannot_be_sealed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    with pytest.raises(ProtocolError, match="cannot be sealed"):
        EntryMemory.received(os.open(tmp_path / "file", os.O_RDWR), len(DATA))


def test_received_memory_cannot_be_made_smaller() -> None:
    """A process that reads a mapping of it would be killed."""
    with (
        closing(EntryMemory.of([DATA], len(DATA))) as memory,
        closing(EntryMemory.received(memory.lend(), len(DATA))) as received,
    ):
        with pytest.raises(PermissionError):
            memory.cut(1)
        assert received.content == DATA


def test_the_next_entry_gets_what_was_prepared() -> None:
    """Also if it is a little larger; one that is much smaller does not get it."""
    with closing(SpareMemory()) as spare:
        spare.take(100 * KIB).close()
        prepared = spare._spare
        assert prepared is not None
        wait_until(lambda: pages(prepared) >= 106 * KIB, "the pages are allocated")
        memory = spare.take(105 * KIB)
        assert memory is prepared
        assert memory.size == 105 * KIB
        memory.fill([DATA[: 105 * KIB]])
        assert memory.content == DATA[: 105 * KIB]
        other = spare._spare
        assert spare.take(20 * KIB) is not other


def test_spare_memory_is_for_large_entries_until_its_close() -> None:
    with closing(SpareMemory()) as spare:
        spare.take(10 * KIB)
        assert spare._spare is None
        spare.take(100 * KIB)
    assert spare._spare is None
    assert spare.take(100 * KIB).size == 100 * KIB
    assert spare._spare is None
