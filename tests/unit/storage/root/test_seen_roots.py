"""A machine that has seen a newer root detects an older root that was put back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.builders import memory_repository, whole, write
from helpers.scripted_store import script, unscript
from helpers.system_calls import SystemCalls

import raystow
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, StateError
from raystow.storage.format import keys
from raystow.storage.repository import Repository
from raystow.storage.root.seen_roots import SEEN_ROOTS
from raystow.storage.runtime.clock import SYSTEM


@pytest.fixture
def repository() -> Repository:
    """Return a repository with one version."""
    made = memory_repository()
    save(made)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SEEN_ROOTS, str(tmp_path / "seen"))
    return tmp_path / "seen"


def save(repository: Repository) -> None:
    write(Committer(repository, SYSTEM.token()), {"w": whole(np.arange(5.0))})


def root(repository: Repository) -> bytes:
    return repository.store.get(keys.ROOT, max_bytes=1 << 20)


READS: list[Callable[[Repository], object]] = [
    lambda repository: repository.versions(),
    lambda repository: raystow.latest(repository.uri),
    lambda repository: repository.pin(raystow.open(repository.uri).version(1), "old"),
    save,
]


@pytest.mark.parametrize("access", READS)
@pytest.mark.parametrize("newer", [save, lambda repository: repository.rollback(1)], ids=["saved", "rolled_back"])
def test_an_older_root_is_refused(
    repository: Repository, folder: Path, newer: Callable[[Repository], object], access: Callable[[Repository], object]
) -> None:
    old = root(repository)
    newer(repository)
    new = root(repository)
    repository.store.put(keys.ROOT, [old])
    with pytest.raises(Damaged, match="an older root was put back") as caught:
        access(repository)
    assert root(repository) == old  # the refused access did not overwrite it
    repository.store.put(keys.ROOT, [new])
    access(repository)
    repository.store.put(keys.ROOT, [old])
    (path,) = folder.glob("*.json")
    assert str(path) in caught.value.remedy
    path.unlink()
    access(repository)


def test_without_the_variable_no_root_is_recorded(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SEEN_ROOTS, raising=False)
    old = root(repository)
    save(repository)
    repository.store.put(keys.ROOT, [old])
    assert [version.id for version in repository.versions()] == [1]


def test_a_slow_read_of_an_older_root_is_accepted(repository: Repository, folder: Path) -> None:
    """A process reads slowly while another process commits."""
    get = repository.store.get_tagged

    def slow(key: str, *, max_bytes: int) -> object:
        found = get(key, max_bytes=max_bytes)
        unscript(repository.store)
        save(repository)
        return found

    repository.root()
    script(repository.store, get_tagged=slow)
    assert len(repository.root().versions) == 1
    assert len(repository.root().versions) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"epoch": "x"}'])
def test_a_damaged_note_is_an_error(repository: Repository, folder: Path, text: str) -> None:
    repository.root()
    (path,) = folder.glob("*.json")
    path.write_text(text)
    with pytest.raises(StateError, match="cannot be read") as caught:
        repository.root()
    assert caught.value.subject == str(path)


def test_a_commit_succeeds_although_it_cannot_be_noted(
    system_calls: SystemCalls,
    repository: Repository,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    committer = Committer(repository, SYSTEM.token())
    replace = os.replace

    def full(path: str, target: str) -> None:
        if Path(path).parent == folder:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(path, target)

    system_calls.replace(replace=full)
    write(committer, {"w": whole(np.arange(5.0))})
    assert "cannot be written: No space left" in caplog.text
    with pytest.raises(StateError, match="cannot be written"):
        repository.versions()
    assert {path.suffix for path in folder.iterdir()} == {".json", ".lock"}, "no temporary files are left"
    monkeypatch.undo()
    assert len(repository.versions()) == 2


def test_the_folder_may_be_the_current_one(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SEEN_ROOTS, ".")
    repository.root()
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_folder_that_cannot_be_used_is_an_error(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    cases = {"": "is set, but empty", str(tmp_path / "file" / "folder"): "cannot be", "~no-such-user/seen": "home directory"}
    for value, what in cases.items():
        monkeypatch.setenv(SEEN_ROOTS, value)
        with pytest.raises(StateError, match=what):
            repository.root()


def test_a_link_that_leaves_the_folder_is_not_read(repository: Repository, folder: Path, tmp_path: Path) -> None:
    raystow.open(repository.uri).latest()
    (file,) = folder.glob("*.json")
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(StateError, match="leads out of its folder"):
        raystow.open(repository.uri).latest()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StateError, match="is not a regular file"):
        raystow.open(repository.uri).latest()
