"""Verification finds what is wrong: the quick one without reading packs, the deep one in every byte, in bounded memory."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from builders import write
from packs import flip, noise, pack_key, write_packs

from raystow.storage.committer import Committer
from raystow.storage.errors import Damaged
from raystow.storage.format import keys
from raystow.storage.repository import Repository, create_repository
from raystow.storage.verify import verify_bytes
from raystow.storage.version import Version

MiB = 1 << 20


def three_packs(repository: Repository) -> Version:
    return write_packs(repository, {number: noise(5000, number) for number in range(3)})


def forbid_reading_packs(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_range(key: str, start: int, length: int) -> bytes:
        raise AssertionError(f"{key} was read")

    monkeypatch.setattr(repository.store, "get_range", get_range)


def test_the_quick_one_reads_no_pack(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    version = three_packs(repository)
    forbid_reading_packs(repository, monkeypatch)
    found = repository.verify(version, deep=False)
    assert (found.tensors, found.chunks, found.packs, found.raw, found.stored) == (3, 3, 3, 15000, 15000)
    assert (found.read, found.resumed) == (0, 0)


@pytest.mark.parametrize("change", ["missing", "shorter", "longer"])
def test_the_quick_one_finds_packs_of_another_size(repository: Repository, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    version = three_packs(repository)
    key = pack_key(version, 1)
    data = repository.store.get(key, max_bytes=MiB)
    if change == "missing":
        repository.store.delete([key])
    else:
        repository.store.put(key, [data[:-1] if change == "shorter" else data + b"\0"])
    forbid_reading_packs(repository, monkeypatch)
    with pytest.raises(Damaged, match=key):
        repository.verify(version, deep=False)


def test_only_the_deep_one_finds_a_flipped_bit_of_a_pack(repository: Repository) -> None:
    version = three_packs(repository)
    key = pack_key(version, 2)
    flip(repository, key)
    repository.verify(version, deep=False)
    with pytest.raises(Damaged, match=rf"{key}.*'t2'"):
        repository.verify(version)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("part", ["record", "fragment"])
def test_what_was_read_before_is_read_again(repository: Repository, part: str, deep: bool) -> None:
    version = three_packs(repository)
    assert len(version.tensors()) == 3  # from now on this version knows its record and its manifest by heart
    key = keys.record(version.id, version.attempt) if part == "record" else keys.fragment(version.id, version.attempt, 0)
    flip(repository, key)
    with pytest.raises(Damaged, match=key):
        repository.verify(version, deep=deep)


@pytest.mark.parametrize("deep", [False, True])
def test_a_manifest_that_holds_an_element_twice_is_damage(repository: Repository, deep: bool) -> None:
    boxes = [((0,), (2,)), ((1,), (2,))]  # of four elements the second is held twice, the last not at all
    version = write(Committer(repository, "me"), {"t": (np.arange(4.0), boxes)})
    with pytest.raises(Damaged, match=r"^t: .*exactly once"):
        repository.verify(version, deep=deep)


@pytest.mark.parametrize("deep", [False, True])
def test_sums_that_differ_are_damage(repository: Repository, deep: bool) -> None:
    version = write_packs(repository, {0: noise(5000)}, raw=5001)
    with pytest.raises(Damaged, match=r"version\.json.*sums"):
        repository.verify(version, deep=deep)


def test_progress_adds_up_to_the_decoded_bytes(repository: Repository) -> None:
    version = write_packs(repository, {0: noise(5000), 1: np.zeros(70_000, np.float32)})
    told = list[int]()
    found = repository.verify(version, told.append)
    assert sum(told) == version.raw == found.raw
    assert found.read == version.bytes < version.raw


def test_packs_are_read_several_at_a_time(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    version = write_packs(repository, {number: noise(5000, number) for number in range(2)})
    both = threading.Barrier(2)
    get_range = repository.store.get_range

    def met(*where: Any) -> Any:
        both.wait(timeout=30)
        return get_range(*where)

    monkeypatch.setattr(repository.store, "get_range", met)
    repository.verify(version)


@pytest.mark.parametrize("memory", [1, 80 * MiB])
def test_memory_is_bounded(tmp_path: Any, memory: int) -> None:
    """A read of the 13 MiB packs below takes 13 MiB stored and 2 x 13 MiB to decode: one fits into nothing, two into 80 MiB."""
    repository = create_repository(str(tmp_path))
    version = write_packs(repository, {number: noise(13 * MiB, number) for number in range(12)})
    assert version.bytes > 150 * MiB
    tracemalloc.start()
    try:
        found = verify_bytes(version, repository.store, memory=memory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.read == version.bytes
    assert peak < max(memory, 39 * MiB) + MiB


def test_as_many_reads_at_a_time_as_memory_has_room_for(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    version = write_packs(repository, {number: noise(MiB, number) for number in range(6)})
    get_range, lock, two = repository.store.get_range, threading.Lock(), threading.Event()
    reading, most = 0, 0

    def counted(*where: Any) -> Any:
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
            if reading == 2:
                two.set()
        assert two.wait(30), "nobody else reads"
        data = get_range(*where)
        with lock:
            reading -= 1
        return data

    monkeypatch.setattr(repository.store, "get_range", counted)
    verify_bytes(version, repository.store, memory=8 * MiB)  # two reads of 3 MiB each fit
    assert most == 2
