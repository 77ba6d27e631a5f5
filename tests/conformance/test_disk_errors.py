"""Errors of disks and of network file systems that a folder as a store survives."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from helpers.system_calls import SystemCalls

from raystow.storage.errors import StoreUnavailable
from raystow.storage.stores.local import LocalStore

KEY = "versions/1/object"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_file_that_another_machine_replaced_is_opened_again(store: LocalStore, system_calls: SystemCalls) -> None:
    """NFS calls the handle of the replaced file stale."""
    store.put(KEY, [b"content"])
    pread, preadv, stale = os.pread, os.preadv, [1]

    def fail() -> None:
        if stale[0]:
            stale[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    system_calls.replace(pread=lambda *given: fail() or pread(*given))
    system_calls.replace(preadv=lambda *given: fail() or preadv(*given))
    target = bytearray(4)
    for read in (
        lambda: store.get(KEY, max_bytes=9),
        lambda: store.get_range(KEY, 0, 7),
        lambda: store.get_range_into(KEY, 3, memoryview(target)),
    ):
        stale[0] = 1
        assert read() in (b"content", None)
        stale[0] = 99
        with pytest.raises(StoreUnavailable, match="ESTALE"):
            read()
    assert target == b"tent"


def test_a_swap_whose_folder_was_not_synced_is_not_read(store: LocalStore, system_calls: SystemCalls) -> None:
    """Else its writer would take it for durable: a power cut could bring the old content back."""
    tag, broken, fsync = store.put_if("root.json", b"old", None), [True], os.fsync

    def sync(descriptor: int) -> None:
        if broken[0] and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    system_calls.replace(fsync=sync)
    for operation in (lambda: store.put_if("root.json", b"new", tag), lambda: store.get_tagged("root.json", max_bytes=9)):
        with pytest.raises(StoreUnavailable, match="EIO"):
            operation()
    broken[0] = False
    assert store.get_tagged("root.json", max_bytes=9).data == b"new"
