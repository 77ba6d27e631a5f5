"""Behaviour specific to the local store: several processes, full disks, partial files, folders."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.system_calls import SystemCalls

from raystow.storage.errors import Damaged, PreconditionFailed, StateError, StoreError, StoreFull, StoreUnavailable, UnsafeStore
from raystow.storage.object_store import ObjectStore
from raystow.storage.stores import durable, open_store
from raystow.storage.stores.local import LOCK, LocalStore

KEY = "versions/00000001-0123456789abcdef/weights-00000-00000.pack"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(str(root))


@pytest.fixture
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def create(store: LocalStore, number: int) -> int | None:
    try:
        store.put_if("root.json", b"%d" % number, None)
    except PreconditionFailed:
        return None
    return number


def increment(store: ObjectStore, times: int) -> None:
    while times:
        held = store.get_tagged("root.json", max_bytes=99)
        try:
            store.put_if("root.json", b"%d" % (int(held.data) + 1), held.tag)
            times -= 1
        except PreconditionFailed:
            continue


def test_eight_processes_lose_no_increment(store: LocalStore, processes: ProcessPoolExecutor) -> None:
    """Exactly one process creates the object."""
    won = [number for number in processes.map(create, [store] * 16, range(16)) if number is not None]
    assert [b"%d" % number for number in won] == [store.get("root.json", max_bytes=9)]
    for waiting in [processes.submit(increment, store, 10) for _ in range(8)]:
        waiting.result()
    assert int(store.get("root.json", max_bytes=9)) == won[0] + 80


@pytest.mark.parametrize("operation", ["put", "put_if"])
def test_a_write_that_fails_leaves_the_old_content(store: LocalStore, root: Path, operation: str) -> None:
    """The failed write leaves no partial file."""
    tag = store.put_if("root.json", b"old", None)
    script = f"""
import resource
from raystow.storage.errors import StoreUnavailable
from raystow.storage.stores.local import LocalStore
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store, data = LocalStore({str(root)!r}), b"x" * 200_000
try:
    store.put("root.json", [data]) if {operation!r} == "put" else store.put_if("root.json", data, {tag!r})
except StoreUnavailable as error:
    assert {str(root / "root.json")!r} in str(error) and "EFBIG" in str(error), error
else:
    raise SystemExit("it was written")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert store.get("root.json", max_bytes=9) == b"old"
    assert files(root) == [LOCK, "root.json"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EIO, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
        (errno.EROFS, StoreError),
        (errno.EACCES, StoreError),
    ],
)
@pytest.mark.parametrize("call", ["writev", "fsync", "replace"])
def test_disk_errors_name_the_object_and_the_errno(
    store: LocalStore, root: Path, system_calls: SystemCalls, number: int, kind: type[StoreError], call: str
) -> None:
    store.put(KEY, [b"old"])

    system_calls.fail(call, number)
    with pytest.raises(StoreError) as caught:
        store.put(KEY, [b"new"])
    system_calls.restore()
    assert type(caught.value) is kind
    assert f"{root}/{KEY}: {os.strerror(number)} ({errno.errorcode[number]})" in str(caught.value)
    assert caught.value.remedy
    assert files(root) == [KEY]
    assert store.get(KEY, max_bytes=9) == b"old"


def test_an_object_and_all_its_folders_are_synced(store: LocalStore, root: Path, system_calls: SystemCalls) -> None:
    """The object before it gets its name, its folders after that, up to the root."""
    done, fsync, replace = list[str](), os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(old: str, new: str) -> None:
        done.append("renamed")
        replace(old, new)

    store.put("a/b/first", [b""])  # makes the folders
    system_calls.replace(fsync=synced)
    system_calls.replace(replace=renamed)
    store.put("a/b/second", [b"content"])
    assert done[0].startswith(durable.TEMPORARY)
    assert done[1:] == ["renamed", "b", "a", root.name]
    done.clear()
    store.put("top", [b"content"])
    assert done[1:] == ["renamed", root.name]


def test_short_writes_are_continued(store: LocalStore, system_calls: SystemCalls) -> None:
    real = os.writev
    system_calls.replace(writev=lambda fd, parts: real(fd, [bytes(parts[0])[:3]]))
    parts = [bytes([value]) * (value % 8) for value in range(60)]
    store.put(KEY, parts)
    assert store.get(KEY, max_bytes=10**6) == b"".join(parts)


def test_short_reads_are_continued(store: LocalStore, system_calls: SystemCalls) -> None:
    """The kernel reads at most 2 GiB at a time."""
    store.put(KEY, [b"0123456789"])
    pread, preadv, target = os.pread, os.preadv, bytearray(8)
    system_calls.replace(pread=lambda file, length, start: pread(file, min(3, length), start))
    system_calls.replace(preadv=lambda file, parts, start: preadv(file, [parts[0][:3]], start))
    assert store.get(KEY, max_bytes=10) == b"0123456789"
    assert store.get_range(KEY, 1, 8) == b"12345678"
    store.get_range_into(KEY, 1, memoryview(target))
    assert target == b"12345678"


def test_concurrent_writes_are_limited_but_never_block_put_if(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, begun, gate, write = LocalStore(root, writers=2), threading.Semaphore(0), threading.Event(), durable.write

    def gated(folder: Path, key: str, *how: Any, **more: Any) -> None:
        if key != "root.json":
            begun.release()
            assert gate.wait(30)
        write(folder, key, *how, **more)

    monkeypatch.setattr(durable, "write", gated)
    names = [f"{KEY}.{i}" for i in range(5)]
    with ThreadPoolExecutor(5) as pool:
        writes = [pool.submit(store.put, name, [b"x"]) for name in names]
        try:
            assert begun.acquire(timeout=30)
            assert begun.acquire(timeout=30)
            assert not begun.acquire(timeout=0.5), "a third thread writes concurrently"
            store.put_if("root.json", b"1", None)
        finally:
            gate.set()
        for done in writes:
            done.result(30)
    assert set(files(root)) == {LOCK, "root.json", *names}


def test_a_killed_writer_leaves_nothing_in_the_listing(store: LocalStore, root: Path) -> None:
    tag = store.put_if("root.json", b"old", None)
    script = f"""
import os, signal
from raystow.storage.stores.local import LocalStore
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
LocalStore({str(root)!r}).put_if("root.json", b"new", {tag!r})
"""
    killed = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [info.key for info in store.list("")] == ["root.json"]
    # The kernel released the lock when its holder died.
    store.put_if("root.json", b"newer", tag)


def test_a_held_lock_is_awaited_until_the_lock_timeout(root: Path) -> None:
    hasty = LocalStore(str(root), lock_timeout=0.2)
    tag = hasty.put_if("root.json", b"0", None)
    with (root / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match=r"held the lock for 0\.2 s"):
            hasty.put_if("root.json", b"1", tag)
        assert hasty.get("root.json", max_bytes=9) == b"0"
        threading.Timer(0.2, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        LocalStore(str(root), lock_timeout=30).put_if("root.json", b"1", tag)


def test_threads_exclude_each_other_if_flock_is_per_process(store: LocalStore, system_calls: SystemCalls) -> None:
    system_calls.replace(flock=lambda *_: None)
    store.put_if("root.json", b"0", None)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda opened: increment(opened, 10), [open_store(store.uri) for _ in range(8)]))
    assert store.get("root.json", max_bytes=9) == b"80"


def test_a_file_system_without_flock_is_refused(store: LocalStore, system_calls: SystemCalls) -> None:
    system_calls.fail("flock", errno.ENOSYS)
    with pytest.raises(UnsafeStore, match="no flock"):
        store.put_if("root.json", b"0", None)
    assert list(store.list("")) == []


def test_an_empty_folder_is_removed_with_its_last_object(store: LocalStore, root: Path) -> None:
    store.put(KEY, [b"x"])
    store.put("versions/2/y", [b"y"])
    store.delete([KEY])
    assert sorted(path.name for path in root.rglob("*")) == ["2", "versions", "y"]
    store.delete(["versions/2/y"])
    assert list(root.iterdir()) == []
    assert root.is_dir()


def test_a_put_during_the_removal_of_its_folder_succeeds(store: LocalStore) -> None:
    def churn(name: str) -> None:
        for _ in range(150):
            store.put(f"versions/deep/{name}", [b"x"])
            assert store.get(f"versions/deep/{name}", max_bytes=1) == b"x"
            store.delete([f"versions/deep/{name}"])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(churn, "abc"))


def test_files_that_are_not_objects_are_ignored(store: LocalStore, root: Path, tmp_path: Path) -> None:
    store.put("versions/a", [b"x"])
    (root / "versions" / ".raystow.tmp-0123").write_bytes(b"half")
    (root / ".raystow.lock").touch()
    (root / "versions" / "notes of mine.txt").touch()
    (root / "loop").symlink_to(root)
    (root / "outside").symlink_to(tmp_path)
    assert [info.key for info in store.list("")] == ["versions/a"]
    store.delete(["versions/a"])
    assert (root / "versions" / "notes of mine.txt").exists()


def test_a_file_at_the_root_path_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    store = LocalStore(str(tmp_path / "run"))
    assert list(store.list("")) == []
    for write in (lambda: store.put(KEY, [b"x"]), lambda: store.put_if("root.json", b"x", None)):
        with pytest.raises(StoreError, match="use another folder"):
            write()
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to every folder")
def test_a_folder_without_write_permission_is_reported(store: LocalStore, root: Path) -> None:
    root.mkdir()
    root.chmod(0o500)
    with pytest.raises(StoreError, match="right to read and write"):
        store.put(KEY, [b"x"])


@pytest.mark.parametrize("form", ["{0}", "file://{0}", "file://localhost{0}", "{0}/", "{0}/../run"])
def test_all_spellings_of_a_folder_give_one_uri(root: Path, form: str) -> None:
    assert open_store(form.format(root)).uri == root.as_uri()


def test_the_uri_of_a_path_that_is_not_utf8_opens_it(tmp_path: Path) -> None:
    store = open_store(os.fsdecode(bytes(tmp_path / "run") + b"\xff"))
    store.put(KEY, [b"here"])
    assert open_store(store.uri).get(KEY, max_bytes=4) == b"here"


def test_relative_and_home_paths_become_absolute_uris(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("run").uri == open_store("./run").uri == open_store("~/run").uri == root.as_uri()
    assert open_store(f"file://{tmp_path}/a%20b").uri == (tmp_path / "a b").as_uri()


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "a\0b",
        "ftp://bucket/x",
        "http://host/x",
        "s3:/bucket/x",
        "s3://",
        "s3:///x",
        "s3://b/../x",
        "s3://bucket/a//b",
        "s3://AKIA:hush-hush@bucket/x",
        "file://host/x",
        "file:/x?y",
        "file://[x",
        "file:///x%00y",
        "x\ud800",
        "memory://",
        "memory://a/b",
    ],
)
def test_an_invalid_address_lists_the_valid_forms(uri: str) -> None:
    with pytest.raises(StateError, match=r"is no bucket name|use s3://bucket/prefix, gs://bucket/prefix, az://") as caught:
        open_store(uri)
    assert "hush" not in str(caught.value)


def test_a_local_store_imports_no_cloud_library(tmp_path: Path) -> None:
    script = f"""
import sys
from raystow.storage.object_store import ObjectStore
from raystow.storage.stores import open_store
open_store({str(tmp_path)!r}).put("k", [b"x"])
assert not {{"boto3", "botocore", "obstore"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def special_file(kind: str, path: Path) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made, tempfile.TemporaryDirectory() as short:  # the path may be too long
                made.bind(f"{short}/socket")
                shutil.move(f"{short}/socket", path)
        case "symbolic link":
            path.symlink_to("/dev/zero")
        case "device":
            try:
                os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
            except PermissionError:
                pytest.skip("only root can make a device")


@pytest.mark.parametrize("kind", ["pipe", "socket", "symbolic link", "device"])
def test_special_files_raise_damaged(store: LocalStore, root: Path, kind: str) -> None:
    store.put(KEY, [b"x"])
    (root / KEY).unlink()
    special_file(kind, root / KEY)
    accesses: list[Callable[[], object]] = [
        lambda: store.get(KEY, max_bytes=10),
        lambda: store.get_range(KEY, 0, 1),
        lambda: store.get_range_into(KEY, 0, memoryview(bytearray(1))),
        lambda: store.put_if(KEY, b"y", None),
    ]
    for access in accesses:
        with pytest.raises(Damaged, match=f"no regular file, but a {kind}") as caught:
            access()
        assert caught.value.subject == str(root / KEY)
    assert list(store.list("")) == []
    store.put(KEY, [b"x"])  # replaces the special file
    assert store.get(KEY, max_bytes=10) == b"x"


def test_put_if_does_not_read_a_huge_file(store: LocalStore, root: Path) -> None:
    store.put(KEY, [b"x"])
    os.truncate(root / KEY, 1 << 42)
    with pytest.raises(PreconditionFailed):
        store.put_if(KEY, b"y", "0" * 64)
