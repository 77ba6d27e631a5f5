"""What is known of a repository's versions while its store does not answer."""

from __future__ import annotations

import threading

import pytest
from builders import empty_record

from raystow.orchestrator.restore.version_cache import VersionCache
from raystow.storage.errors import StoreUnavailable
from raystow.storage.format.root import Entry
from raystow.storage.stores.memory import MemoryStore


def versions(known: VersionCache) -> tuple[tuple[Entry, ...], bool]:
    root, answered = known.root()
    return root.versions, answered


def down(*_: object, **__: object) -> None:
    raise StoreUnavailable("503", subject="root.json")


def test_the_store_says_which_versions_there_are(committer):
    known = VersionCache(committer.catalog)
    assert versions(known) == ((), True)
    entry = committer.commit(empty_record(committer, 1)).entry
    assert versions(known) == ((entry,), True)


def test_a_store_that_is_down_is_not_needed_for_what_was_known(committer, monkeypatch):
    known = VersionCache(committer.catalog)
    known.root()
    entry = committer.commit(empty_record(committer, 1)).entry
    known.committed(committer.root)
    monkeypatch.setattr(MemoryStore, "get_tagged", down)
    assert versions(known) == ((entry,), False)
    monkeypatch.undo()
    assert versions(known) == ((entry,), True)


def test_nothing_is_known_of_a_store_that_never_answered(committer, monkeypatch):
    monkeypatch.setattr(MemoryStore, "get_tagged", down)
    with pytest.raises(StoreUnavailable, match="503"):
        VersionCache(committer.catalog).root()


def test_a_silent_store_is_not_waited_for(committer, monkeypatch):
    """Its late answer is ignored."""
    known = VersionCache(committer.catalog, timeout=0.2)
    known.root()
    speak, get = threading.Event(), MemoryStore.get_tagged

    def stalling(self, *args, **kwargs):
        found = get(self, *args, **kwargs)
        speak.wait(30)
        return found

    monkeypatch.setattr(MemoryStore, "get_tagged", stalling)
    assert versions(known) == ((), False)
    monkeypatch.undo()
    entry = committer.commit(empty_record(committer, 1)).entry
    assert versions(known) == ((), False)  # the first answer is still waited for
    speak.set()
    while not (answer := versions(known))[1]:
        pass
    assert answer == ((entry,), True)
