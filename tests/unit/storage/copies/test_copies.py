"""Copies of versions between stores: which versions are copied, in which order, and which copies are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.builders import live_ids, whole, write

import raystow
from raystow.storage.commit.committer import Committer
from raystow.storage.copies import transfer
from raystow.storage.copies.copy import plan_copy
from raystow.storage.copies.transfer import copy_objects
from raystow.storage.errors import Damaged, Fenced, StateError, Untrusted
from raystow.storage.format import key_files, keys
from raystow.storage.format.manifest import Chunk
from raystow.storage.object_store import Buffer
from raystow.storage.repository import Repository, create_repository, open_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.versions.version import Version

RANDOM = np.random.default_rng(0).standard_normal(5000)


def of(value: float) -> dict[str, np.ndarray]:
    return {"w": RANDOM + value}


def save(committer: Committer, value: float, base: int | None = None, of_base: float = 0.0) -> Version:
    tensors = {name: whole(array) for name, array in of(value).items()}
    return write(committer, tensors, base=None if base is None else (base, of(of_base)))


def objects(repository: Repository) -> dict[str, bytes]:
    found = [info.key for info in repository.store.list(keys.VERSIONS)]
    return {key: repository.store.get(key, max_bytes=1 << 26) for key in found}


@pytest.fixture
def committer(monkeypatch: pytest.MonkeyPatch) -> Committer:
    """Return the committer of a repository with three versions; version 3 is a delta to version 2."""
    for name in (key_files.SIGNING_KEY, key_files.TRUSTED_KEYS):
        monkeypatch.delenv(name, raising=False)
    made = Committer(create_repository(f"memory://source-{SYSTEM.token()}"), SYSTEM.token())
    save(made, 0.0)
    save(made, 1.0)
    save(made, 1.0 + 1e-12, base=2, of_base=1.0)
    assert made.root.versions[-1].bases == (2,)
    return made


@pytest.fixture
def source(committer: Committer) -> Repository:
    return open_repository(committer.catalog.uri)


@pytest.fixture
def there() -> str:
    return f"memory://replica-{SYSTEM.token()}"


def test_a_replica_has_the_same_objects_as_its_source(source: Repository, there: str) -> None:
    assert [version.id for version in raystow.copy(source.uri, there)] == [1, 2, 3]
    replica = open_repository(there)
    assert objects(replica) == objects(source)
    assert [v.entry for v in replica.versions()] == [v.entry for v in source.versions()]
    for version in replica.versions():
        replica.verify(version)
    assert raystow.copy(source.uri, there) == []


def test_a_version_of_empty_tensors_is_copied(committer: Committer, source: Repository, there: str) -> None:
    write(committer, {"w": whole(np.empty(0))})
    assert [version.id for version in raystow.copy(source.uri, there)] == [1, 2, 3, 4]
    assert open_repository(there).version(4).read("w").shape == (0,)


def test_a_selected_version_is_copied_with_its_bases(source: Repository, there: str) -> None:
    assert [version.id for version in raystow.copy(source.uri, there, [3])] == [2, 3]
    assert np.array_equal(open_repository(there).version(3).read("w"), of(1.0 + 1e-12)["w"])
    with pytest.raises(StateError, match="version 1 is older"):
        raystow.copy(source.uri, there, [1])
    assert raystow.copy(source.uri, there) == []


def test_new_versions_and_rollbacks_are_replicated(committer: Committer, source: Repository, there: str) -> None:
    raystow.copy(source.uri, there)
    source.rollback(1)
    assert raystow.copy(source.uri, there) == []
    assert live_ids(open_repository(there)) == [1]
    source.rollback(3)
    raystow.copy(source.uri, there)
    assert live_ids(open_repository(there)) == [1, 2, 3]
    source.rollback(2)
    committer.notice(source.root())
    save(committer, 4.0)
    assert [version.id for version in raystow.copy(source.uri, there)] == [4]
    assert live_ids(open_repository(there)) == [1, 2, 4]
    with pytest.raises(StateError, match="version 3 is rolled back"):
        raystow.copy(source.uri, there, [3])


def test_rollbacks_of_dropped_versions_are_replicated(committer: Committer, source: Repository, there: str) -> None:
    raystow.copy(source.uri, there)
    source.rollback(2)
    committer.notice(source.root())
    save(committer, 4.0)
    source.plan_retention(raystow.Policy(drop_rolled_back=True)).execute()
    assert source.rolled_back() == []
    raystow.copy(source.uri, there)
    replica = open_repository(there)
    assert live_ids(replica) == [1, 2, 4]
    assert [version.id for version in replica.rolled_back()] == [3]


def test_a_replica_keeps_versions_that_the_source_drops(committer: Committer, source: Repository, there: str) -> None:
    source.rollback(2)  # before the first copy
    committer.notice(source.root())
    save(committer, 4.0)
    raystow.copy(source.uri, there)
    save(committer, 5.0)
    source.pin(source.version(1), "first")
    source.plan_retention(raystow.Policy(keep_last=1)).execute()
    assert live_ids(source) == [1, 5]
    raystow.copy(source.uri, there)
    assert live_ids(open_repository(there)) == [1, 2, 4, 5]


@pytest.mark.parametrize("kind", ["pack", "parquet", "version.json"])
def test_a_damaged_source_fails_with_its_key_and_adds_nothing(source: Repository, there: str, kind: str) -> None:
    (key,) = [k for k in objects(source) if k.startswith("versions/00000002-") and k.endswith(kind)]
    data = bytearray(objects(source)[key])
    data[len(data) // 2] ^= 1
    source.store.put(key, [data])
    with pytest.raises(Damaged, match=r"do(es)? not match") as raised:
        raystow.copy(source.uri, there)
    assert raised.value.subject == key
    assert live_ids(open_repository(there)) == [1]


@pytest.mark.parametrize("versions", ["12", 1])
def test_versions_to_copy_are_a_list(source: Repository, there: str, versions: Any) -> None:
    with pytest.raises(StateError, match=f"versions is {versions!r} .give a list of versions"):
        raystow.copy(source.uri, there, versions)


def test_a_target_with_other_saves_is_refused(source: Repository, there: str) -> None:
    Committer(create_repository(other := f"{there}-other"), "training")
    with pytest.raises(StateError, match="another repository"):
        raystow.copy(source.uri, other)
    with pytest.raises(StateError, match="the same"):
        raystow.copy(source.uri, source.uri)
    raystow.copy(source.uri, there)
    save(Committer(open_repository(there), "failover"), 9.0)
    with pytest.raises(StateError, match="failover has saved there"):
        raystow.copy(source.uri, there)


def test_an_empty_list_copies_nothing(source: Repository, there: str) -> None:
    assert raystow.copy(source.uri, there, []) == []
    assert live_ids(open_repository(there)) == []
    raystow.copy(source.uri, there, [2])
    assert raystow.copy(source.uri, there, []) == []
    assert live_ids(open_repository(there)) == [2]


def test_a_rollback_is_not_repeated_after_a_failover(committer: Committer, source: Repository, there: str) -> None:
    raystow.copy(source.uri, there)
    source.rollback(2)
    plan = plan_copy(source.uri, there)
    replica = open_repository(there)
    save(Committer(replica, "failover"), 9.0)
    with pytest.raises(Fenced, match="failover"):
        plan.execute()
    assert live_ids(replica) == [1, 2, 3, 4]


def test_signatures_are_kept_or_renewed(tmp_path: Path, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        key_files.write_pair(tmp_path / name)
    monkeypatch.delenv(key_files.TRUSTED_KEYS, raising=False)
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "old"))
    signer = key_files.signer()
    source = create_repository(f"memory://signed-{SYSTEM.token()}", signer=signer)
    save(Committer(source, "training", signer), 0.0)
    monkeypatch.delenv(key_files.SIGNING_KEY)
    raystow.copy(source.uri, there)
    assert open_repository(there).latest().metrics == {}  # type: ignore[union-attr]
    assert objects(open_repository(there)) == objects(source)
    with pytest.raises(StateError, match="no signing key"):
        raystow.copy(source.uri, f"{there}-2", sign=True)
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "new"))
    with pytest.raises(Untrusted, match="signed with key"):
        raystow.copy(source.uri, f"{there}-2", sign=True)
    monkeypatch.setenv(key_files.TRUSTED_KEYS, str(tmp_path))  # the folder has both public keys
    raystow.copy(source.uri, f"{there}-2", sign=True)
    version = open_repository(f"{there}-2", trusted_keys=tmp_path / "new.pub").latest()
    assert version is not None
    assert np.array_equal(version.read("w"), of(0.0)["w"])


KILLED = """
import os, signal, sys
import raystow
from raystow.storage.stores.local import LocalStore
put, left = LocalStore.put, [int(sys.argv[3])]
def counted(self, key, parts):
    if key.startswith("versions/"):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
    put(self, key, parts)
LocalStore.put = counted
raystow.copy(sys.argv[1], sys.argv[2], memory=1)
"""


def test_a_killed_copy_resumes_without_copying_twice(tmp_path: Path) -> None:
    here, there = tmp_path / "run", tmp_path / "replica"
    committer = Committer(create_repository(str(here)), "training")
    save(committer, 0.0)
    save(committer, 1.0)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(here), str(there), "5"], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # the pack, the fragment, and the record of version 1, and two objects of version 2
    assert live_ids(open_repository(str(there))) == [1]
    packs = {path: os.stat(path).st_ino for path in sorted(there.rglob("*.p*")) if path.suffix in (".pack", ".parquet")}
    assert len(packs) == 4
    last = next(path for path in packs if path.suffix == ".pack" and "00000002" in str(path))
    data = last.read_bytes()
    assert [version.id for version in raystow.copy(here, there)] == [2]
    assert {path: os.stat(path).st_ino for path in packs} == packs
    assert last.read_bytes() == data


def test_a_collection_keeps_what_a_copy_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "run", tmp_path / "replica"
    committer = Committer(create_repository(str(here)), "training")
    save(committer, 0.0)
    save(committer, 1.0)
    replica = plan_copy(str(here), str(there)).replica
    for version in open_repository(str(here)).versions():  # copies that were interrupted two hours ago
        copy_objects(version, replica.store)
    for path in there.rglob("*"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 7200))
    wrong = transfer.wrong_chunk

    def checked(data: Buffer, chunks: Sequence[Chunk]) -> Chunk | None:
        replica.plan_collection().execute()
        return wrong(data, chunks)

    monkeypatch.setattr(transfer, "wrong_chunk", checked)
    assert [version.id for version in raystow.copy(here, there)] == [1, 2]


def test_a_damaged_leftover_object_is_copied_again(source: Repository, there: str) -> None:
    raystow.copy(source.uri, there, [1])
    (key,) = [k for k in objects(source) if k.startswith("versions/00000002-") and k.endswith("pack")]
    open_repository(there).store.put(key, [bytes(len(objects(source)[key]))])
    raystow.copy(source.uri, there)
    assert objects(open_repository(there)) == objects(source)


def test_a_replica_keeps_versions_that_the_source_compacts(committer: Committer, source: Repository, there: str) -> None:
    raystow.copy(source.uri, there)
    save(committer, 5.0)
    source.plan_compaction([3]).execute()
    assert source.version(3).attempt != open_repository(there).version(3).attempt
    committer.notice(source.root())
    save(committer, 1.0 + 2e-12, base=3, of_base=1.0 + 1e-12)
    assert [version.id for version in raystow.copy(source.uri, there)] == [4, 5]
    replica = open_repository(there)
    assert replica.version(3).entry.bases == (2,)
    for version in replica.versions():
        replica.verify(version)


def test_a_base_that_the_replica_dropped_is_named(committer: Committer, source: Repository, there: str) -> None:
    raystow.copy(source.uri, there)
    save(committer, 5.0)
    raystow.copy(source.uri, there)
    replica = open_repository(there)
    replica.plan_retention(raystow.Policy(keep_last=1)).execute()
    assert live_ids(replica) == [4]
    save(committer, 1.0 + 2e-12, base=3, of_base=1.0 + 1e-12)
    with pytest.raises(StateError, match="a delta to version 3, which was dropped there"):
        raystow.copy(source.uri, there)
    assert live_ids(replica) == [4]
