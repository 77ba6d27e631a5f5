"""Unfinished writes (begun and never completed) are listed and aborted by each store that can list them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from helpers.system_calls import SystemCalls

from raystow.storage.errors import StoreError, StoreUnavailable
from raystow.storage.object_store import ObjectStore, Unfinished
from raystow.storage.repository import create_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store
from raystow.storage.stores.local import LocalStore
from raystow.workers.packing.metered_store import Metered

MOTO = "RAYSTOW_TEST_S3" not in os.environ
FOLDERS = ("versions/00000001-0123456789abcdef", "versions/00000002-0123456789abcdef")

_KILLED = """
import os, signal, sys
from raystow.storage.stores import open_store
os.writev = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
open_store(sys.argv[1]).put(sys.argv[2], [b"x" * 1000])
"""


def killed_writer(uri: str, key: str) -> None:
    """Run a process that is killed during a put."""
    ended = subprocess.run([sys.executable, "-c", _KILLED, uri, key], timeout=60)
    assert ended.returncode == -signal.SIGKILL


def begun_upload(uri: str, key: str) -> None:
    """Start a multipart upload with one part, as a killed process leaves it."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client, key = boto3.client("s3"), f"{prefix}/{key}"
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * (5 << 20))


@pytest.fixture
def begin(uri: str) -> Callable[[str], None]:
    """Return a function that leaves a write unfinished. Memory has no such writes, and obstore does not list them."""
    if uri.startswith(("memory:", "az:", "gs:")):
        pytest.skip("this store does not list unfinished writes")
    leave = begun_upload if uri.startswith("s3:") else killed_writer
    return lambda key: leave(uri, key)


def found(store: ObjectStore) -> list[Unfinished]:
    return sorted(store.unfinished(), key=lambda write: (write.key, write.token))


def test_finished_writes_are_not_listed(store: ObjectStore) -> None:
    store.put(f"{FOLDERS[0]}/a.pack", [b"x"])
    store.put(f"{FOLDERS[0]}/b.pack", [bytes(17 << 20)])
    store.put_if("root.json", b"1", None)
    store.abort(store.unfinished())
    assert found(store) == []
    assert len(list(store.list(""))) == 3


def test_unfinished_writes_are_listed_and_aborted(store: ObjectStore, begin: Callable[[str], None]) -> None:
    store.put(f"{FOLDERS[0]}/a.pack", [b"whole"])
    for folder in FOLDERS:
        begin(f"{folder}/b.pack")
    writes = found(store)
    assert [write.key.removesuffix("/b.pack") for write in writes] == list(FOLDERS)
    assert [info.key for info in store.list("")] == [f"{FOLDERS[0]}/a.pack"]
    store.abort(iter(writes[:1]))
    assert found(store) == writes[1:]
    store.abort(writes)  # the first is gone: no error
    assert found(store) == []
    assert store.get(f"{FOLDERS[0]}/a.pack", max_bytes=9) == b"whole"


def test_gc_aborts_only_writes_of_its_own_repository(store: ObjectStore, uri: str, begin: Callable[[str], None]) -> None:
    repository = create_repository(uri)
    pack = f"{FOLDERS[0]}/weights-00000-00000.pack"
    for key in (pack, "data/train.bin", f"nested/{pack}"):
        begin(key)
    repository.plan_collection(grace=0).execute()
    assert [write.key.partition("/")[0] for write in found(store)] == ["data", "nested"]


def test_unfinished_writes_of_one_key_are_aborted_separately(store: ObjectStore, begin: Callable[[str], None]) -> None:
    for _ in range(2):
        begin(f"{FOLDERS[0]}/a.pack")
    first, second = found(store)
    store.abort([first])
    assert found(store) == [second]


def test_unfinished_writes_of_other_stores_are_not_listed(store: ObjectStore, uri: str, begin: Callable[[str], None]) -> None:
    begin("a.pack")
    assert found(open_store(uri[:-1])) == []  # this uri is a prefix of the real one
    assert len(found(store)) == 1


def test_a_metered_store_lists_and_aborts_unfinished_writes(store: ObjectStore, begin: Callable[[str], None]) -> None:
    begin("versions/a.pack")
    metered = Metered(store, SYSTEM)
    metered.abort(metered.unfinished())
    assert found(store) == []


@pytest.mark.s3
@pytest.mark.skipif(MOTO, reason="moto gives every upload the same date")
def test_an_unfinished_upload_has_its_start_time(s3_uri: str) -> None:
    begun_upload(s3_uri, "a.pack")
    (write,) = open_store(s3_uri).unfinished()
    assert abs(write.started - SYSTEM.now()) < 60


@pytest.mark.s3
@pytest.mark.skipif(MOTO, reason="moto returns all uploads in one page")
def test_more_than_one_page_of_uploads_is_listed(s3_uri: str) -> None:
    bucket, _, prefix = s3_uri.removeprefix("s3://").partition("/")
    client, names = boto3.client("s3"), [f"{FOLDERS[0]}/{number:04d}.pack" for number in range(1050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{name}"), names))
    store = open_store(s3_uri)
    assert [write.key for write in found(store)] == names
    store.abort(store.unfinished())
    assert found(store) == []


def test_files_of_other_programs_are_not_listed_or_aborted(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    store = LocalStore(root)
    store.put("versions/a.pack", [b"x"])
    elsewhere.mkdir()
    (elsewhere / ".raystow.tmp-00").touch()
    (root / ".hidden").mkdir()
    (root / ".hidden" / ".raystow.tmp-00").touch()
    (root / "linked").symlink_to(elsewhere)
    (root / ".raystow.tmp-link").symlink_to(elsewhere / ".raystow.tmp-00")
    assert found(store) == []
    (root / ".raystow.tmp-00").touch()
    os.utime(root / ".raystow.tmp-00", (1e9, 1e9))
    assert found(store) == [Unfinished("", ".raystow.tmp-00", 1e9)]
    for token in ("a.pack", ".raystow.tmp-/../versions/a.pack", ".raystow.lock"):
        with pytest.raises(StoreError, match="not a temporary file"):
            store.abort([Unfinished("versions", token, 0)])
    store.abort(found(store))
    assert [info.key for info in store.list("")] == ["versions/a.pack"]
    assert (elsewhere / ".raystow.tmp-00").exists()


def test_a_writer_whose_temporary_file_was_aborted_fails(tmp_path: Path, system_calls: SystemCalls) -> None:
    store = LocalStore(tmp_path / "run")
    real = os.fsync

    def collected_meanwhile(descriptor: int) -> None:
        real(descriptor)
        store.abort(store.unfinished())

    system_calls.replace(fsync=collected_meanwhile)
    with pytest.raises(StoreUnavailable, match="No such file"):
        store.put("versions/a.pack", [b"x"])
    system_calls.restore()
    assert list(store.list("")) == []
    store.put("versions/a.pack", [b"x"])
