"""A disk that becomes full at each kind of write: the save fails or its outcome is unknown, and the next save succeeds."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.builders import memory_repository, whole, write
from helpers.fake_clock import FakeClock
from helpers.local_cluster import LocalCluster
from helpers.scripted_store import script

import raystow
from raystow.storage.commit.committer import Committer, outcome_in
from raystow.storage.errors import StoreFull
from raystow.storage.object_store import Buffer, Tagged
from raystow.storage.runtime.clock import Clock
from raystow.storage.stores import durable

KINDS = {
    "pack": r"\.pack$",
    "fragment": r"/tensors-.*\.parquet$",
    "record": r"/version\.json$",
    "root": r"^root\.json$",
}


def state(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).standard_normal(100_000), "step": step}


def check(version: raystow.Version, step: int) -> None:
    assert version.step == step
    assert np.array_equal(version.read("w"), state(step)["w"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_fails_if_the_disk_is_full_and_the_next_works(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bytes are written; then the disk is full."""
    write, write_all, armed = durable.write, durable._write_all, [False]

    def half(descriptor: int, parts: Sequence[Buffer], kept: bool) -> None:
        data = b"".join(bytes(part) for part in parts)
        os.write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(root: Path, key: str, parts: Sequence[Buffer], clock: Clock, *, kept: bool = False) -> None:
        with monkeypatch.context() as disk:
            if armed[0] and re.search(KINDS[kind], key):
                disk.setattr(durable, "_write_all", half)
            write(root, key, parts, clock, kept=kept)

    monkeypatch.setattr(durable, "write", full)
    with LocalCluster(str(tmp_path / "run")) as cluster:
        monkeypatch.setattr(cluster.committer.catalog.register._register, "_deadline", 0.3)
        check(cluster.save(state(1), step=1), 1)
        armed[0] = True
        with pytest.raises(raystow.OutcomeUnknown if kind == "root" else raystow.SaveFailed, match="space"):
            cluster.save(state(2), step=2)
        armed[0] = False
        assert durable._write_all is write_all
        check(cluster.save(state(3), step=3), 3)
        versions = cluster.repository.versions()
        assert [version.step for version in versions] == [1, 3]
        for version in versions:
            cluster.repository.verify(version)
        with pytest.raises(raystow.SaveFailed):  # the failure is certain now
            outcome_in(cluster.repository.root(), 2, "f" * 16)
    assert [path for path in (tmp_path / "run").rglob(f"{durable.TEMPORARY}*") if path.is_file()] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_real_full_file_system_fails_the_save(small_disk: Path) -> None:
    """No bytes of the failed save remain."""
    with LocalCluster(str(small_disk / "run")) as cluster:
        check(cluster.save(state(1), step=1), 1)
        used = os.statvfs(small_disk).f_bfree
        with pytest.raises(raystow.SaveFailed, match="free space on this file system"):
            cluster.save({"w": np.random.default_rng(0).standard_normal(4 << 20)}, step=2)
        check(cluster.save(state(3), step=3), 3)
        assert os.statvfs(small_disk).f_bfree > used - 600  # in pages: the size of one more small save


def test_a_pin_waits_for_no_space_and_a_commit_does() -> None:
    repository = memory_repository(FakeClock())
    committer = Committer(repository, "me")
    version = write(committer, {"w": whole(np.zeros(3))})
    put_if, full, written = repository.store.put_if, [0], [False]

    def refuse(key: str, data: bytes, tag: str | None) -> str:
        if not full[0]:
            return put_if(key, data, tag)
        full[0] -= 1
        if written[0]:
            put_if(key, data, tag)
        raise StoreFull("no space", subject=key)

    script(repository.store, put_if=refuse)
    full[0] = 3
    with pytest.raises(StoreFull):
        repository.pin(version, "first")
    assert full[0] == 2
    write(committer, {"w": whole(np.ones(3))})
    assert full[0] == 0
    full[0], written[0] = 1, True  # the store fails after the swap
    repository.pin(version, "first")
    assert repository.root().pins == {"first": 1}
    full[0], written[0] = 1, False

    def refuse_reads(key: str, max_bytes: int) -> Tagged:
        raise StoreFull("no space", subject=key)

    script(repository.store, get_tagged=refuse_reads)
    with pytest.raises(StoreFull):
        repository.unpin("first")
