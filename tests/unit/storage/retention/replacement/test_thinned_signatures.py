"""Thinning: signed versions stay signed, and unsigned versions are not signed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.builders import overwrite_root
from helpers.training_versions import mixed, thin

from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, Untrusted
from raystow.storage.format import key_files, keys
from raystow.storage.format.signature import Signer, Trust
from raystow.storage.repository import Repository


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    key_files.write_pair(tmp_path / "key")
    monkeypatch.delenv(key_files.TRUSTED_KEYS, raising=False)
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "key"))
    made = key_files.signer()
    assert made is not None
    return made


@pytest.mark.parametrize("asked", [False, True])
def test_a_thinned_version_stays_signed(
    repository: Repository, signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, asked: bool
) -> None:
    if asked:
        repository = Repository(repository.store, repository.id, clock=repository.clock, signed_by=(signer.public,))
    committer = Committer(repository, "me", signer)
    for step in (1, 2, 3):
        mixed(committer, step)
    for path in (None, tmp_path / "other"):
        with monkeypatch.context() as patch:
            if path is None:
                patch.delenv(key_files.SIGNING_KEY)
            else:
                key_files.write_pair(path)
                patch.setenv(key_files.SIGNING_KEY, str(path))
            with pytest.raises(Untrusted):
                thin(repository)
    assert thin(repository)
    reader = Repository(repository.store, repository.id, trust=Trust((signer.public,)))
    assert reader.version(1).record.thinned is not None


def test_thinning_does_not_sign_an_unsigned_version(
    repository: Repository, committer: Committer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Untrusted, match="is not signed"):
        thin(repository)
    monkeypatch.delenv(key_files.SIGNING_KEY)
    assert thin(repository)
    version = repository.version(1)
    assert not list(repository.store.list(keys.signature(1, version.attempt)))


def test_a_forged_origin_is_not_signed(repository: Repository, signer: Signer) -> None:
    committer = Committer(repository, "me", signer)
    for step in (1, 2, 3):
        mixed(committer, step)
    overwrite_root(
        repository, lambda root: replace(root, versions=(replace(root.versions[0], saved="0" * 16), *root.versions[1:]))
    )
    with pytest.raises(Damaged, match="the record does not"):
        thin(repository)
