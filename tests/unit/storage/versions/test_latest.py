"""``raystow.latest`` reads one object and makes the same checks as ``raystow.open``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers.builders import memory_repository, whole, write

import raystow
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys, records
from raystow.storage.format.signature import Signer
from raystow.storage.object_store import ObjectInfo
from raystow.storage.repository import Repository, create_repository
from raystow.storage.stores.local import LocalStore


def test_latest_returns_the_newest_version_with_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committer = Committer(create_repository(str(tmp_path)), "me")
    _, newest = (write(committer, {"w": whole(np.arange(5.0) + i)}) for i in range(2))
    reads: list[str] = []

    class Noting(LocalStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            reads.append(key)
            return super().get(key, max_bytes=max_bytes)

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            reads.append(prefix)
            return super().list(prefix)

    monkeypatch.setattr("raystow.storage.repository.open_store", Noting)
    version = raystow.latest(tmp_path)
    assert reads == [keys.ROOT]
    monkeypatch.undo()
    assert version == newest
    assert np.array_equal(version.read("w"), np.arange(5.0) + 1)


def test_latest_without_a_version_or_a_repository(repository: Repository, tmp_path: Path) -> None:
    assert raystow.latest(repository.uri) is None
    with pytest.raises(raystow.NotARepository):
        raystow.latest(tmp_path / "nothing")
    repository.store.put(keys.ROOT, [b"damaged"])
    with pytest.raises(raystow.Damaged, match="raystow repair"):
        raystow.latest(repository.uri)


def test_an_interrupted_creation_has_no_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The creation writes the root after the marker, and a save writes its objects after the root."""
    root = Path(create_repository(str(tmp_path)).uri.removeprefix("file://"), keys.ROOT)
    written = root.read_bytes()
    root.unlink()
    assert raystow.latest(tmp_path) is None
    assert raystow.open(tmp_path).versions() == []
    LocalStore(str(tmp_path)).put(keys.pack(1, "0" * 16, 0, "g", 0), [b"of a save"])
    for read in (raystow.latest, create_repository):
        with pytest.raises(raystow.Damaged, match=r"root is missing.*raystow repair"):
            read(str(tmp_path))
    list_objects = LocalStore.list

    def list_after_creation(store: LocalStore, prefix: str) -> Iterator[ObjectInfo]:
        root.write_bytes(written)
        return list_objects(store, prefix)

    monkeypatch.setattr(LocalStore, "list", list_after_creation)
    assert raystow.latest(tmp_path) is None


def test_signatures_are_checked_when_the_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSTOW_TRUSTED_KEYS", raising=False)
    signer = Signer(Ed25519PrivateKey.generate())
    repository = memory_repository(signer=signer)
    write(Committer(repository, "signs", signer), {"w": whole(np.arange(3.0))})
    version = raystow.latest(repository.uri)
    assert version is not None
    repository.store.delete([keys.signature(version.id, version.attempt)])
    with pytest.raises(raystow.Untrusted, match="not signed"):
        version.tensors()


def test_a_foreign_marker_is_detected_with_the_record_read(repository: Repository) -> None:
    write(Committer(repository, "me"), {"w": whole(np.arange(3.0))})
    repository.store.put(keys.MARKER, [records.dump({"repository": "other", "created": 0.0}, keys.MARKER)])
    version = raystow.latest(repository.uri)
    assert version is not None
    with pytest.raises(raystow.Damaged, match="belongs to repository other"):
        version.tensors()
