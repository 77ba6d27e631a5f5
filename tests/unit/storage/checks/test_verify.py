"""Verification finds damage: quick verification reads no pack, and deep verification checks each byte in bounded memory."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from helpers.builders import memory_repository, whole, write
from helpers.packs import flip, noise, pack_key, write_packs
from helpers.scripted_store import script

from raystow.storage.checks.verify import verify_bytes
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged
from raystow.storage.format import keys
from raystow.storage.repository import Repository
from raystow.storage.versions.version import Version

MiB = 1 << 20


def three_packs(repository: Repository) -> Version:
    return write_packs(repository, {number: noise(5000, number) for number in range(3)})


def forbid_reading_packs(repository: Repository) -> None:
    def get_range(key: str, start: int, length: int) -> bytes:
        raise AssertionError(f"{key} was read")

    script(repository.store, get_range=get_range)


def test_quick_verification_reads_no_pack(repository: Repository) -> None:
    version = three_packs(repository)
    forbid_reading_packs(repository)
    found = repository.verify(version, deep=False)
    assert (found.tensors, found.chunks, found.packs, found.raw, found.stored) == (3, 3, 3, 15000, 15000)
    assert (found.read, found.resumed) == (0, 0)


@pytest.mark.parametrize("change", ["missing", "shorter", "longer"])
def test_quick_verification_finds_packs_of_another_size(repository: Repository, change: str) -> None:
    version = three_packs(repository)
    key = pack_key(version, 1)
    data = repository.store.get(key, max_bytes=MiB)
    if change == "missing":
        repository.store.delete([key])
    else:
        repository.store.put(key, [data[:-1] if change == "shorter" else data + b"\0"])
    forbid_reading_packs(repository)
    with pytest.raises(Damaged, match=key):
        repository.verify(version, deep=False)


def test_deep_verification_accepts_empty_packs(repository: Repository) -> None:
    version = write_packs(repository, {number: np.empty(0, np.uint8) for number in range(2)})
    assert repository.verify(version, deep=True).packs == 2


def test_only_deep_verification_finds_a_flipped_bit_of_a_pack(repository: Repository) -> None:
    version = three_packs(repository)
    key = pack_key(version, 2)
    flip(repository, key)
    repository.verify(version, deep=False)
    with pytest.raises(Damaged, match=rf"{key}.*'t2'"):
        repository.verify(version)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("part", ["record", "fragment"])
def test_verification_reads_cached_objects_again(repository: Repository, part: str, deep: bool) -> None:
    version = three_packs(repository)
    assert len(version.tensors()) == 3  # now the version has its record and its manifest cached
    key = keys.record(version.id, version.attempt) if part == "record" else keys.fragment(version.id, version.attempt, 0)
    flip(repository, key)
    with pytest.raises(Damaged, match=key):
        repository.verify(version, deep=deep)


@pytest.mark.parametrize("deep", [False, True])
def test_a_manifest_with_overlapping_chunks_is_damage(repository: Repository, deep: bool) -> None:
    boxes = [((0,), (2,)), ((1,), (2,))]  # of four elements the second is in both chunks, and the last in none
    version = write(Committer(repository, "me"), {"t": (np.arange(4.0), boxes)})
    with pytest.raises(Damaged, match=r"^t: .*exactly once"):
        repository.verify(version, deep=deep)


@pytest.mark.parametrize("deep", [False, True])
def test_a_version_of_empty_tensors_is_verified(repository: Repository, deep: bool) -> None:
    version = write(Committer(repository, "me"), {"t": whole(np.empty((0, 3)))})
    assert repository.verify(version, deep=deep).chunks == 1


@pytest.mark.parametrize("deep", [False, True])
def test_inconsistent_sums_of_bytes_are_damage(repository: Repository, deep: bool) -> None:
    version = write_packs(repository, {0: noise(5000)}, raw=5001)
    with pytest.raises(Damaged, match=r"version\.json.*sums"):
        repository.verify(version, deep=deep)


def test_progress_adds_up_to_the_decoded_bytes(repository: Repository) -> None:
    version = write_packs(repository, {0: noise(5000), 1: np.zeros(70_000, np.float32)})
    told = list[int]()
    found = repository.verify(version, told.append)
    assert sum(told) == version.raw == found.raw
    assert found.read == version.bytes < version.raw


def test_packs_are_read_concurrently(repository: Repository) -> None:
    version = write_packs(repository, {number: noise(5000, number) for number in range(2)})
    both = threading.Barrier(2)
    get_range = repository.store.get_range

    def met(*where: Any) -> Any:
        both.wait(timeout=30)
        return get_range(*where)

    script(repository.store, get_range=met)
    repository.verify(version)


@pytest.mark.parametrize("memory", [1, 80 * MiB])
def test_memory_is_bounded(memory: int) -> None:
    """A read of a 13 MiB pack needs 13 MiB for stored bytes and 26 MiB for decoding. A limit of 1 byte still allows one read;
    80 MiB allow two.
    """
    repository = memory_repository()
    version = write_packs(repository, {number: noise(13 * MiB, number) for number in range(12)})
    assert version.bytes > 150 * MiB
    tracemalloc.start()
    try:
        found = verify_bytes(version, memory=memory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.read == version.bytes
    assert peak < max(memory, 39 * MiB) + MiB


def test_the_memory_limit_bounds_concurrent_reads(repository: Repository) -> None:
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
        assert two.wait(30), "no second read is in progress"
        data = get_range(*where)
        with lock:
            reading -= 1
        return data

    script(repository.store, get_range=counted)
    verify_bytes(version, memory=8 * MiB)  # two reads of 3 MiB each fit
    assert most == 2
