"""Tests of the ``ObjectStore`` contract, run against every store."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - this is how Ray sends stores between processes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from raystow.storage.checks.probe import probe_conditional_writes
from raystow.storage.errors import Damaged, NotFound, PreconditionFailed, StoreError, UnsafeStore
from raystow.storage.object_store import Buffer, ObjectStore, StreamedStore
from raystow.storage.stores import open_store
from raystow.storage.stores.cloud import CloudStore
from raystow.storage.stores.memory import MemoryStore

MIB = 1 << 20
KEY = "versions/00000001-0123456789abcdef/weights-00000-00000.pack"


def read(store: ObjectStore, key: str = KEY) -> bytes:
    return store.get(key, max_bytes=1 << 40)


def read_into(store: ObjectStore, key: str, start: int, length: int) -> bytes:
    """Read a range into the middle of a buffer and check that the bytes around it are unchanged."""
    memory = bytearray(b"\xa5") * (length + 20)
    store.get_range_into(key, start, memoryview(memory)[10 : length + 10])
    assert memory[:10] == memory[length + 10 :] == b"\xa5" * 10
    return bytes(memory[10 : length + 10])


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_a_store_implements_the_protocol_and_returns_its_uri(store: ObjectStore, uri: str) -> None:
    assert isinstance(store, ObjectStore)
    assert store.uri == uri


def test_put_writes_and_replaces_an_object(store: ObjectStore) -> None:
    store.put(KEY, [b"one"])
    assert read(store) == b"one"
    store.put(KEY, [b"tw", bytearray(b"o"), memoryview(b"!")])
    assert read(store) == b"two!"
    assert keys(store) == [KEY]


@pytest.mark.parametrize("parts", [[], [b""], [b"", memoryview(b""), bytearray()]])
def test_an_empty_object_is_stored_and_listed(store: ObjectStore, parts: list[Buffer]) -> None:
    store.put(KEY, parts)
    assert read(store) == b""
    assert [info.size for info in store.list("")] == [0]
    assert bytes(store.get_range(KEY, 0, 0)) == read_into(store, KEY, 0, 0) == b""
    for read_range in (store.get_range, partial(read_into, store)):
        with pytest.raises(Damaged, match=KEY):
            read_range(KEY, 0, 1)


def test_a_large_object_of_many_parts_is_read_in_ranges(store: ObjectStore) -> None:
    random = np.random.default_rng(1)
    data = random.bytes(40 * MIB + 12345)
    cuts = [0, 1, 1, 7, 5 * MIB - 1, 5 * MIB, 16 * MIB, 16 * MIB + 1, 17 * MIB, 17 * MIB, 39 * MIB, len(data)]
    cuts += random.integers(len(data), size=3000).tolist()
    cuts.sort()
    view = memoryview(data)
    parts: list[Buffer] = [b"", *(view[a:b] for a, b in pairwise(cuts)), b""]
    store.put(KEY, parts)
    assert read(store) == data
    for start, length in ((0, 1), (16 * MIB - 5, 10), (33 * MIB + 1, 5 * MIB), (len(data) - 1, 1), (0, len(data))):
        assert bytes(store.get_range(KEY, start, length)) == data[start : start + length]
        assert read_into(store, KEY, start, length) == data[start : start + length]


def test_buffers_of_any_format_are_written_as_bytes(store: ObjectStore) -> None:
    store.put(KEY, [memoryview(bytes(range(24))).cast("i"), memoryview(bytes(range(24))).cast("B", (4, 6))])
    assert read(store) == bytes(range(24)) * 2


@pytest.fixture
def streamed(store: ObjectStore) -> StreamedStore:
    """Return a store that exports stream to. A local folder is none: exports write its files themselves."""
    if not isinstance(store, StreamedStore):
        pytest.skip("files are written without a store")
    return store


@pytest.mark.parametrize("nbytes", [0, 5, 33 * MIB + 7])
def test_a_stream_may_reuse_its_memory(streamed: StreamedStore, nbytes: int) -> None:
    memory, data = bytearray(3 * MIB + 1), np.random.default_rng(2).bytes(nbytes)

    def content() -> Iterator[Buffer]:
        for at in range(0, nbytes, len(memory)):
            part = data[at : at + len(memory)]
            memory[: len(part)] = part
            yield memoryview(memory)[: len(part)]
            memory[:] = bytes(len(memory))

    streamed.put_stream(KEY, content, nbytes)
    assert read(streamed) == data


def test_a_failed_stream_stores_nothing(streamed: StreamedStore) -> None:
    def content() -> Iterator[Buffer]:
        for _ in range(20):
            yield bytes(MIB)
        raise Damaged("x", subject="a chunk")

    with pytest.raises(Damaged, match="a chunk"):
        streamed.put_stream(KEY, content, 40 * MIB)
    assert keys(streamed) == []
    assert list(streamed.unfinished()) == []


def test_get_range_is_exact_or_raises_damaged(store: ObjectStore) -> None:
    data = bytes(range(200))
    store.put(KEY, [data])
    for start, length in ((0, 200), (0, 1), (199, 1), (50, 100), (7, 0), (200, 0)):
        assert bytes(store.get_range(KEY, start, length)) == data[start : start + length]
    for start, length in ((0, 201), (199, 2), (200, 1), (201, 0), (10**9, 5), (-1, 5), (5, -1)):
        with pytest.raises(Damaged, match=KEY):
            store.get_range(KEY, start, length)


def test_get_range_into_is_exact_or_raises_damaged(store: ObjectStore) -> None:
    data = bytes(range(200))
    store.put(KEY, [data])
    for start, length in ((0, 200), (0, 1), (199, 1), (50, 100), (7, 0), (200, 0)):
        assert read_into(store, KEY, start, length) == data[start : start + length]
    for start, length in ((0, 201), (199, 2), (200, 1), (201, 0), (10**9, 5), (-1, 5)):
        with pytest.raises(Damaged, match=KEY):
            read_into(store, KEY, start, length)


def test_get_range_into_fills_a_numpy_array(store: ObjectStore) -> None:
    store.put(KEY, [bytes(range(200))])
    target = np.zeros(100, np.uint8)
    store.get_range_into(KEY, 50, target.data)
    assert target.tolist() == list(range(50, 150))


def test_a_missing_object_raises_not_found_with_its_key(store: ObjectStore) -> None:
    reads: list[Callable[[str], Any]] = [
        lambda key: store.get(key, max_bytes=10),
        lambda key: store.get_tagged(key, max_bytes=10),
        lambda key: store.get_range(key, 0, 1),
        lambda key: store.get_range(key, 0, 0),
        lambda key: read_into(store, key, 0, 1),
        lambda key: read_into(store, key, 0, 0),
    ]
    for there in (False, True):
        for missing in (KEY, "versions", "versions/00000001-0123456789abcdef"):
            for attempt in reads:
                with pytest.raises(NotFound, match=missing):
                    attempt(missing)
        if not there:
            store.put(KEY + ".other", [b"x"])
    assert keys(store, "nothing/") == []


def test_an_object_larger_than_max_bytes_raises_damaged(store: ObjectStore) -> None:
    store.put(KEY, [b"x" * 1000])
    assert len(store.get(KEY, max_bytes=1000)) == 1000
    for attempt in (store.get, store.get_tagged):
        with pytest.raises(Damaged, match=KEY):
            attempt(KEY, max_bytes=999)


def test_list_filters_by_prefix_and_sorts_by_key(store: ObjectStore) -> None:
    names = ["a", "a-b", "a.b", "a/b", "a/b-c", "a0", "aa/b/c", "ab", "b/a", "b/a/"]
    written = sorted(name for name in names if not name.endswith("/") and name != "a")
    for name in np.random.default_rng(3).permutation(written).tolist():
        store.put(name, [name.encode()])
    assert keys(store) == written
    for prefix in ("a", "a/", "a/b", "a/b-", "aa/", "aa/b/c", "aa/b/c/", "b", "c", "a-"):
        assert keys(store, prefix) == [name for name in written if name.startswith(prefix)]
    infos = {info.key: info for info in store.list("")}
    assert all(infos[name].size == len(name) for name in written)
    assert all(infos[name].modified > 1.6e9 for name in written)


def test_list_and_delete_handle_more_than_one_page(store: ObjectStore) -> None:
    number = 263 if isinstance(store, CloudStore) else 1203  # more than one delete request
    names = [f"versions/{i % 7:08d}-0123456789abcdef/other-00000-{i:05d}.pack" for i in range(number)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, [b"x"]), names))
    assert keys(store) == sorted(names)
    assert keys(store, "versions/00000003-") == sorted(name for name in names if "/00000003-" in name)
    store.delete(iter(names[: number - 5]))
    assert keys(store) == sorted(names[number - 5 :])
    store.delete(names)
    assert keys(store) == []


def test_deleting_a_missing_object_is_no_error(store: ObjectStore) -> None:
    store.delete([])
    store.delete([KEY])
    store.put(KEY, [b"x"])
    store.delete([KEY, KEY, "versions/other"])
    with pytest.raises(NotFound):
        read(store)
    store.put(KEY, [b"again"])
    assert read(store) == b"again"


def test_put_if_creates_once_and_replaces_only_by_current_tag(store: ObjectStore) -> None:
    first = store.put_if("root.json", b"1", None)
    assert store.get_tagged("root.json", max_bytes=10).data == b"1"
    assert store.get_tagged("root.json", max_bytes=10).tag == first
    with pytest.raises(PreconditionFailed, match=r"root\.json"):
        store.put_if("root.json", b"x", None)
    second = store.put_if("root.json", b"2", first)
    assert second != first
    for tag in (first, None):
        with pytest.raises(PreconditionFailed):
            store.put_if("root.json", b"x", tag)
    third = store.put_if("root.json", b"3", second)
    assert store.get_tagged("root.json", max_bytes=10).data == b"3"
    store.delete(["root.json"])
    with pytest.raises(PreconditionFailed):
        store.put_if("root.json", b"x", third)
    assert keys(store) == []
    store.put_if("root.json", b"4", None)


def test_an_object_written_by_put_has_a_tag(store: ObjectStore) -> None:
    store.put("root.json", [b"1"])
    old = store.get_tagged("root.json", max_bytes=10).tag
    store.put("root.json", [b"2"])
    with pytest.raises(PreconditionFailed):
        store.put_if("root.json", b"x", old)
    store.put_if("root.json", b"3", store.get_tagged("root.json", max_bytes=10).tag)
    assert read(store, "root.json") == b"3"


def skip_moto(store: ObjectStore) -> None:
    """Skip a test of concurrent writers on moto, which compares and writes in two steps: two may succeed."""
    if store.uri.startswith("s3://") and "RAYSTOW_TEST_S3" not in os.environ:
        pytest.skip("needs a real S3 server: make test-s3")


def test_exactly_one_of_sixteen_writers_creates_an_object(store: ObjectStore) -> None:
    skip_moto(store)
    gate = threading.Barrier(16)

    def contend(number: int) -> str | None:
        gate.wait()
        try:
            return store.put_if("root.json", b"%d" % number, None)
        except PreconditionFailed:
            return None

    with ThreadPoolExecutor(16) as pool:
        tags = list(pool.map(contend, range(16)))
    winners = [number for number, tag in enumerate(tags) if tag is not None]
    assert len(winners) == 1
    found = store.get_tagged("root.json", max_bytes=10)
    assert (found.data, found.tag) == (b"%d" % winners[0], tags[winners[0]])


def test_concurrent_put_if_loses_no_increment(store: ObjectStore) -> None:
    skip_moto(store)
    store.put_if("root.json", b"0", None)

    def increment(opened: ObjectStore) -> None:
        for _ in range(5):
            while True:
                held = opened.get_tagged("root.json", max_bytes=10)
                try:
                    opened.put_if("root.json", b"%d" % (int(held.data) + 1), held.tag)
                    break
                except PreconditionFailed:
                    continue

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, [store, store, open_store(store.uri), pickle.loads(pickle.dumps(store))]))
    assert read(store, "root.json") == b"20"


def test_readers_never_see_partial_content(store: ObjectStore) -> None:
    contents = [bytes([value]) * (100_000 + value) for value in range(20)]
    store.put(KEY, [contents[0]])
    done = threading.Event()

    def watch() -> int:
        seen = 0
        while not done.is_set():
            data = read(store)
            assert data == bytes([data[0]]) * (100_000 + data[0])
            seen += 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        watchers = [pool.submit(watch) for _ in range(2)]
        for content in contents:
            store.put(KEY, [content[:5], content[5:]])
        done.set()
        assert sum(watcher.result() for watcher in watchers) > 0


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../up", "a/../../b", "a//b", "a/", ".", "..", "a/.", ".raystow.lock", "a\\b", "a\0b", "é", "a" * 600],
)
def test_a_key_outside_the_store_is_rejected(store: ObjectStore, key: str) -> None:
    attempts: list[Callable[[], Any]] = [
        lambda: store.put(key, [b"x"]),
        lambda: store.put_if(key, b"x", None),
        lambda: store.get(key, max_bytes=1),
        lambda: store.get_tagged(key, max_bytes=1),
        lambda: store.get_range(key, 0, 1),
        lambda: read_into(store, key, 0, 1),
        lambda: store.delete([key]),
    ]
    for attempt in attempts:
        with pytest.raises(StoreError, match="not a key"):
            attempt()
    assert keys(store) == []


@pytest.mark.parametrize("prefix", ["/", "../", "a//", ".raystow", "a/../b"])
def test_a_prefix_outside_the_store_is_rejected(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(StoreError, match="not a prefix"):
        list(store.list(prefix))


def test_a_store_can_be_pickled_and_reopened_by_its_uri(store: ObjectStore) -> None:
    store.put(KEY, [b"x"])
    again = pickle.loads(pickle.dumps(store))
    assert again.uri == store.uri
    assert read(again) == b"x"
    assert read(open_store(store.uri)) == b"x"


def test_the_probe_accepts_each_store_and_leaves_no_object(store: ObjectStore) -> None:
    probe_conditional_writes(store)
    probe_conditional_writes(store)
    assert keys(store, "probe/") == []


class Careless(MemoryStore):
    """A store that ignores the write conditions named by ``ignores``, as some servers do."""

    def __init__(self, ignores: str) -> None:
        super().__init__("careless")
        self.ignores = ignores

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        held = self._objects.get(key)
        if self.ignores in ("all", "none-match" if tag is None else "match"):
            return super().put_if(key, data, held[0].tag if held else None)
        if self.ignores == "tags":
            return super().put_if(key, data, tag) and "same"
        return super().put_if(key, data, tag if self.ignores != "never" else "0")


@pytest.mark.parametrize("ignores", ["all", "none-match", "match", "tags", "never"])
def test_the_probe_refuses_a_store_that_ignores_conditions(ignores: str) -> None:
    careless = Careless(ignores)
    with pytest.raises(UnsafeStore, match=r"memory://careless/probe/.*use a store"):
        probe_conditional_writes(careless)
    assert keys(careless) == []
