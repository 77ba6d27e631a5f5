"""Direct writes of the local store: what bypasses the page cache, and what happens where the file system refuses it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.page_cache import page_cached
from helpers.system_calls import SystemCalls

from raystow.storage.errors import StoreUnavailable
from raystow.storage.stores import direct_io
from raystow.storage.stores.local import LocalStore

KEY = "versions/weights.pack"


@pytest.mark.parametrize("size", [4 << 20, (5 << 20) + 1, (1 << 20) + 4095])
def test_page_aligned_data_bypasses_the_page_cache(size: int, tmp_path: Path) -> None:
    store, pages = LocalStore(tmp_path), mmap.mmap(-1, size)
    pages[:] = os.urandom(size)
    store.put(KEY, [memoryview(pages)])
    assert (tmp_path / KEY).stat().st_size == size
    if direct_io.refused(tmp_path.stat().st_dev) is None:
        assert not page_cached(tmp_path / KEY)
    assert (tmp_path / KEY).read_bytes() == pages[:]
    store.put(KEY, [pages[1:]])  # not page-aligned
    assert page_cached(tmp_path / KEY)
    assert (tmp_path / KEY).read_bytes() == pages[1:]


SPANS = [
    [1 << 20, 4095],  # whole pages, and a rest
    [3, direct_io.GATHERED - 3, direct_io.GATHERED + (1 << 19)],  # ends with the second buffer and before the third
    [direct_io.GATHERED] * 12,
    [0, (1 << 20) + 1, 0],
    [100] * 30_000,  # more than one call takes
]


@pytest.mark.parametrize("sizes", SPANS, ids=lambda sizes: f"{len(sizes)} parts")
@pytest.mark.parametrize("kept", [True, False])
def test_parts_of_what_stays_in_memory_bypass_the_page_cache(kept: bool, sizes: list[int], tmp_path: Path) -> None:
    memory, ends = os.urandom(sum(sizes) + 7), [*itertools.accumulate(sizes, initial=7)]
    LocalStore(tmp_path, kept=kept).put(KEY, [memory[start:end] for start, end in itertools.pairwise(ends)])
    if direct_io.refused(tmp_path.stat().st_dev) is None:
        assert page_cached(tmp_path / KEY) is not kept
    assert (tmp_path / KEY).read_bytes() == memory[7:]


def test_parts_are_gathered_in_one_buffer_for_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "_idle", queue.SimpleQueue())
    store, half = LocalStore(tmp_path, kept=True, writers=2), bytes(3 << 20)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"{number}.pack", [half, half]), range(16)))
    used = direct_io.refused(tmp_path.stat().st_dev) is None
    assert int(used) <= direct_io._idle.qsize() <= 2 * used


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct writes are tried, also where the file system of the tests refuses them."""
    monkeypatch.setattr(direct_io, "refused", lambda device: None)


@pytest.mark.usefixtures("direct")
def test_parts_refused_in_between_are_complete(system_calls: SystemCalls, tmp_path: Path) -> None:
    """The rest goes through the page cache, also after a write of less than a buffer."""
    memory, write, limits = os.urandom(11 << 20), os.write, iter([4096, 1 << 30, 0])

    def write_some(descriptor: int, data: memoryview) -> int:
        if not (most := next(limits)):
            raise OSError(errno.EINVAL, "injected")
        return write(descriptor, data[:most])

    system_calls.replace(write=write_some)
    LocalStore(tmp_path, kept=True).put(KEY, [memory[: 5 << 20], memory[5 << 20 :]])
    assert (tmp_path / KEY).read_bytes() == memory


@pytest.mark.usefixtures("direct")
def test_refused_direct_writes_use_the_page_cache(
    system_calls: SystemCalls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal is logged once; a full disk is not treated as a refusal."""
    store, pages, refusal, write = LocalStore(tmp_path), mmap.mmap(-1, 3 << 20), [errno.EINVAL], os.write

    def refuse(descriptor: int, data: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(refusal[0], os.strerror(refusal[0]))
        return write(descriptor, data)

    system_calls.replace(write=refuse)
    direct_io._say.cache_clear()
    caplog.set_level("INFO", "raystow")
    for number in (1, 2):
        pages[:] = os.urandom(len(pages))
        store.put(f"{number}.pack", [pages])
        assert (tmp_path / f"{number}.pack").read_bytes() == pages[:]
    assert [record.message for record in caplog.records] == [
        "the file system refuses direct writes: objects are written through the page cache"
    ]
    refusal[0] = errno.ENOSPC
    with pytest.raises(StoreUnavailable, match="No space"):
        store.put("3.pack", [pages])
