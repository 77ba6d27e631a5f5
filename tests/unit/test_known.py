"""What is known of a repository's versions while its store does not answer."""

from __future__ import annotations

import threading

import pytest
from handmade import empty_record

from raystow.orchestrator.known import Known
from raystow.storage.clock import SYSTEM
from raystow.storage.committer import Committer
from raystow.storage.errors import StoreUnavailable
from raystow.storage.repository import create_repository
from raystow.storage.stores.memory import MemoryStore


@pytest.fixture
def committer() -> Committer:
    return Committer(create_repository(f"memory://known-{SYSTEM.token()}"), "me")


def down(*_: object, **__: object) -> None:
    raise StoreUnavailable("503", subject="root.json")


def test_the_store_says_which_versions_there_are(committer):
    known = Known(committer.repository)
    assert known.versions() == ((), True)
    entry = committer.commit(empty_record(committer, 1)).entry
    assert known.versions() == ((entry,), True)


def test_a_store_that_is_down_is_not_needed_for_what_was_known(committer, monkeypatch):
    known = Known(committer.repository)
    known.versions()
    entry = committer.commit(empty_record(committer, 1)).entry
    known.committed(entry)
    monkeypatch.setattr(MemoryStore, "get_tagged", down)
    assert known.versions() == ((entry,), False)
    monkeypatch.undo()
    assert known.versions() == ((entry,), True)


def test_nothing_is_known_of_a_store_that_never_answered(committer, monkeypatch):
    monkeypatch.setattr(MemoryStore, "get_tagged", down)
    with pytest.raises(StoreUnavailable, match="503"):
        Known(committer.repository).versions()


def test_a_store_that_says_nothing_is_not_waited_for_and_what_it_says_late_does_not_count(committer, monkeypatch):
    known = Known(committer.repository, patience=0.2)
    known.versions()
    speak, get = threading.Event(), MemoryStore.get_tagged

    def stalling(self, *args, **kwargs):
        found = get(self, *args, **kwargs)
        speak.wait(30)
        return found

    monkeypatch.setattr(MemoryStore, "get_tagged", stalling)
    assert known.versions() == ((), False)
    monkeypatch.undo()
    entry = committer.commit(empty_record(committer, 1)).entry
    assert known.versions() == ((), False)  # the first answer is still waited for
    speak.set()
    while not (answer := known.versions())[1]:
        pass
    assert answer == ((entry,), True)
