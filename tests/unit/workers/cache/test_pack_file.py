"""Objects in memory of which only some ranges are requested: each byte is fetched once."""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.pack_memory import opened
from hypothesis import given
from hypothesis import strategies as st

from raystow.workers.cache.pack_file import PackFile, Span, Spares

DATA = os.urandom(1000)


class Origin:
    """The source of the bytes, with the number of requests of each byte."""

    def __init__(self) -> None:
        self.asked = [0] * len(DATA)

    def fetch(self, start: int, target: memoryview) -> None:
        target[:] = DATA[start : start + len(target)]
        for i in range(start, start + len(target)):
            self.asked[i] += 1


def content(file: PackFile, span: Span) -> bytes:
    with open(file.lend(), "rb") as lent:
        return os.pread(lent.fileno(), span[1] - span[0], span[0])


spans = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(st.lists(spans, max_size=5), max_size=5))
def test_every_byte_is_fetched_once(wanted):
    file, origin = PackFile(len(DATA)), Origin()
    for some in wanted:
        file.ensure(some, origin.fetch)
        for span in some:
            assert content(file, span) == DATA[slice(*span)]
    needed = {i for some in wanted for span in some for i in range(*span)}
    assert origin.asked == [int(i in needed) for i in range(len(DATA))]
    assert file.filled == len(needed)
    file.close()


def test_concurrent_requests_fetch_each_byte_once():
    file, origin = PackFile(len(DATA)), Origin()
    together = threading.Barrier(8)

    def ask(number: int) -> bytes:
        together.wait()
        span = (number * 50, number * 50 + 500)
        file.ensure([span], origin.fetch)
        return content(file, span)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [DATA[n * 50 : n * 50 + 500] for n in range(8)]
    assert max(origin.asked) == 1
    file.close()


def test_a_failed_fetch_raises_and_can_be_repeated():
    file, origin = PackFile(len(DATA)), Origin()

    def fail(start: int, target: memoryview) -> None:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        file.ensure([(0, 10)], fail)
    assert file.filled == 0
    file.ensure([(0, 10)], origin.fetch)
    assert content(file, (0, 10)) == DATA[:10]
    file.close()


def test_an_empty_object_needs_no_fetch():
    file = PackFile(0)
    file.write([])
    file.ensure([(0, 0)], Origin().fetch)
    file.close()


def test_thousands_of_parts_are_written_in_order():
    data = bytes(range(250)) * 12
    file = PackFile(len(data))
    file.write([memoryview(data)[start : start + 2] for start in range(0, len(data), 2)])
    assert (bytes(file.content), file.filled) == (data, len(data))


def test_a_closed_file_is_unmapped_with_the_last_view():
    file = PackFile(len(DATA))
    file.write([memoryview(DATA)])
    view, inode = file.content, os.fstat(descriptor := file.lend()).st_ino
    os.close(descriptor)
    file.close()
    assert view == DATA
    assert mapped(inode)
    del view
    assert not mapped(inode)
    with pytest.raises(AttributeError):  # the descriptor may belong to another file now
        file.lend()


def test_a_closed_file_is_not_filled():
    file, origin = PackFile(len(DATA)), Origin()
    file.close()
    with pytest.raises(AttributeError):
        file.ensure([(0, 10)], origin.fetch)
    assert file.filled == 0


def mapped(inode: int) -> bool:
    return any(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def inode_of(file: PackFile) -> int:
    """Return the inode of the memory of the file. The memory is not lent by this call."""
    return os.fstat(file._memory.descriptor).st_ino


def test_memory_without_other_users_is_reused() -> None:
    spares = Spares()
    first = PackFile(len(DATA))
    first.write([memoryview(DATA)])
    inode = inode_of(first)
    spares.give(first)
    assert spares.nbytes == mmap.PAGESIZE
    assert mapped(inode), "the mapping is kept, since a new mapping costs as much as the write"
    half = len(DATA) // 2
    again = PackFile(half, spares.take(half))
    again.write([memoryview(DATA)[half:-1], memoryview(b""), memoryview(DATA)[-1:]])
    assert (again.content, inode_of(again)) == (DATA[half:], inode)
    assert (spares.nbytes, spares.take(1)) == (0, None)
    with pytest.raises(AttributeError):  # the file has no memory any more
        first.write([memoryview(DATA)])
    spares.give(again)
    larger = PackFile(len(DATA), spares.take(len(DATA)))
    larger.write([memoryview(DATA)])
    assert larger.content == DATA
    with open(larger.lend(), "rb") as lent:
        assert lent.read() == DATA, "a lent descriptor has the same content"


@pytest.mark.parametrize("how", ["lent", "viewed"])
def test_memory_with_other_users_is_not_reused(how: str) -> None:
    spares, file = Spares(), PackFile(len(DATA))
    file.write([memoryview(DATA)])
    held = file.lend() if how == "lent" else file.content
    spares.give(file)
    assert spares.nbytes == 0
    assert (os.pread(held, len(DATA), 0) if how == "lent" else bytes(held)) == DATA
    if how == "lent":
        os.close(held)


def test_the_best_fitting_memory_is_taken_first() -> None:
    before, spares = opened(), Spares()
    for size in (100, 300, 200):
        spares.give(PackFile(size))
    assert (opened() - before).total() == 6  # three allocations, each with the descriptor of the memory and of its mapping
    taken = spares.take(150)
    assert os.fstat(taken.descriptor).st_size == 200
    spares.keep(mmap.PAGESIZE)
    assert spares.nbytes == mmap.PAGESIZE
    other = spares.take(1000)
    assert os.fstat(other.descriptor).st_size <= 300, "the largest, if none is large enough"
    spares.keep(0)
    for memory in (taken, other):
        memory.close()
    assert not opened() - before
