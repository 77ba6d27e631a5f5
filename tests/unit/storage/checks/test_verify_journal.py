"""An interrupted deep verification resumes from its journal, and never uses the journal of another repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers.builders import whole, write
from helpers.packs import flip, noise, pack_key, write_packs
from helpers.scripted_store import script

from raystow.storage.checks.verify import verify_bytes
from raystow.storage.checks.verify_progress import journal
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, StateError
from raystow.storage.repository import Repository
from raystow.storage.versions.version import Version


@pytest.fixture
def version(repository: Repository) -> Version:
    return write_packs(repository, {number: noise(5000 + number, number) for number in range(4)})


@pytest.fixture
def read(repository: Repository) -> list[str]:
    """Return the list to which each read of a pack adds its key."""
    keys = list[str]()
    get_range = repository.store.get_range

    def noted(key: str, *where: Any) -> Any:
        keys.append(key)
        return get_range(key, *where)

    script(repository.store, get_range=noted)
    return keys


def test_verified_packs_are_not_read_again(repository: Repository, version: Version, read: list[str], tmp_path: Path) -> None:
    path = tmp_path / "nightly.jsonl"
    data = flip(repository, pack_key(version, 2))
    with journal(path, repository.id) as notes, pytest.raises(Damaged, match=pack_key(version, 2)):
        verify_bytes(version, journal=notes, memory=1)  # one thread: packs are read in their order
    repository.store.put(pack_key(version, 2), [data])
    read.clear()

    told = list[int]()
    with journal(path, repository.id) as notes:
        found = verify_bytes(version, told.append, journal=notes)
    assert sorted(read) == [pack_key(version, 2), pack_key(version, 3)]
    assert (found.resumed, found.read) == (5000 + 5001, 5002 + 5003)
    assert sum(told) == version.raw

    read.clear()
    with journal(path, repository.id) as notes:
        assert repository.verify(version, journal=notes).resumed == version.bytes
    assert read == []


def test_a_pack_is_recorded_after_its_last_read(repository: Repository, read: list[str], tmp_path: Path) -> None:
    """A large pack needs several reads; the last read finds the damage."""
    version = write(Committer(repository, "me"), {name: whole(noise(10 << 20)) for name in ("a", "b", "c")})
    key = pack_key(version, 0)
    data = bytearray(repository.store.get(key, max_bytes=1 << 30))
    data[-1] ^= 1
    repository.store.put(key, [data])
    for _ in range(2):
        with journal(tmp_path / "j", repository.id) as notes, pytest.raises(Damaged, match="'c'"):
            verify_bytes(version, journal=notes, memory=1)
    # in each run two intact chunks, and the damaged chunk twice, since the damage may come from the transfer
    assert read == 8 * [key]


def test_a_missing_pack_is_found_despite_the_journal(repository: Repository, version: Version, tmp_path: Path) -> None:
    with journal(tmp_path / "j", repository.id) as notes:
        repository.verify(version, journal=notes)
        repository.store.delete([pack_key(version, 1)])
        with pytest.raises(Damaged, match=pack_key(version, 1)):
            repository.verify(version, journal=notes)


def test_the_line_of_a_pack_is_written_immediately(repository: Repository, version: Version, tmp_path: Path) -> None:
    path = tmp_path / "j"
    with journal(path, repository.id) as notes:
        for number in range(4):
            notes.add(version.entry.digest, pack_key(version, number))
            assert path.read_text().splitlines()[-1].endswith(f'"{pack_key(version, number)}"}}')


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    """After a kill at any byte, the journal knows the complete lines and the lines that are added later."""
    path, entries = tmp_path / "j", [("ab", "versions/1/a.pack"), ("ab", "versions/1/b.pack"), ("cd", "versions/2/a.pack")]
    with journal(path, "r") as notes:
        for entry in entries:
            notes.add(*entry)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        known = max(0, whole[:cut].count(b"\n") - 1)
        with journal(path, "r") as notes:
            assert [entry in notes for entry in entries] == [number < known for number in range(3)]
            notes.add(*entries[2])
        with journal(path, "r") as notes:
            assert [entry in notes for entry in entries] == [number < known for number in range(2)] + [True]


def test_invalid_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with journal(path, "r") as notes:
        notes.add("ab", "a.pack")
    with path.open("ab") as file:
        file.write(b'\0\0\n[]\n{"record": 1}\n{"record": "ab", "pa{"record": "ab", "pack": "b.pack"}\n')
    with journal(path, "r") as notes:
        notes.add("ab", "c.pack")
    with journal(path, "r") as notes:
        assert [("ab", name) in notes for name in ("a.pack", "b.pack", "c.pack")] == [True, False, True]


def test_a_pack_under_another_record_is_not_done(
    repository: Repository, version: Version, read: list[str], tmp_path: Path
) -> None:
    with journal(tmp_path / "j", repository.id) as notes:
        notes.add("0" * 64, pack_key(version, 0))
        assert repository.verify(version, journal=notes).resumed == 0
    assert pack_key(version, 0) in read


def test_the_journal_of_another_repository_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with journal(path, "one") as notes:
        notes.add("ab", "a.pack")
    before = path.read_bytes()
    with (
        pytest.raises(StateError, match=r"/j: the file is of repository one, not of two \(name a new file\)"),
        journal(path, "two"),
    ):
        pass
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"dear diary", b"{}\n", b"\n", b"\xff\xfe\n{}\n", b'{"journal": "x"}\n', b"[1]\n"])
def test_a_file_that_is_not_a_journal_is_not_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(StateError, match="mine: the file was not written by"), journal(path, "r"):
        pass
    assert path.read_bytes() == content


def test_two_verifications_do_not_share_a_journal(tmp_path: Path) -> None:
    with (
        journal(tmp_path / "j", "r"),
        pytest.raises(StateError, match="another verification is writing to it"),
        journal(tmp_path / "j", "r"),
    ):
        pass
    with journal(tmp_path / "j", "r"):  # the journal is unlocked again
        pass


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_a_link_to_another_folder_is_not_written(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "here").mkdir()
    if content is not None:
        (tmp_path / "elsewhere").write_bytes(content)
    (tmp_path / "here" / "notes").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="leads out of its folder"), journal(tmp_path / "here" / "notes", "cafe"):
        pass
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_bytes() == b""


def test_only_a_regular_file_is_a_journal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(StateError, match="is not a regular file"), journal(path, "cafe"):
            pass
