"""The known versions of a repository while its store does not answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.builders import empty_record
from helpers.scripted_store import script, unscript

from raystow.orchestrator.restore.version_cache import VersionCache
from raystow.storage.errors import StoreUnavailable
from raystow.storage.format.root import Entry, Root


def versions(known: VersionCache) -> tuple[tuple[Entry, ...], bool]:
    root, answered = known.root()
    return root.versions, answered


def down(*_: object, **__: object) -> None:
    raise StoreUnavailable("503", subject="root.json")


def test_versions_are_read_from_the_store(committer):
    known = VersionCache(committer.catalog)
    assert versions(known) == ((), True)
    entry = committer.commit(empty_record(committer, 1)).entry
    assert versions(known) == ((entry,), True)


def test_known_versions_are_used_while_the_store_is_down(committer):
    known = VersionCache(committer.catalog)
    known.root()
    entry = committer.commit(empty_record(committer, 1)).entry
    known.committed(committer.root)
    script(committer.catalog.store, get_tagged=down)
    assert versions(known) == ((entry,), False)
    unscript(committer.catalog.store)
    assert versions(known) == ((entry,), True)


def test_without_a_first_answer_the_store_error_is_raised(committer):
    script(committer.catalog.store, get_tagged=down)
    with pytest.raises(StoreUnavailable, match="503"):
        VersionCache(committer.catalog).root()


def test_a_store_that_does_not_answer_is_not_waited_for(committer):
    """The late answer of the store is ignored."""
    known = VersionCache(committer.catalog, timeout=0.2)
    known.root()
    speak, get = threading.Event(), committer.catalog.store.get_tagged

    def stalling(*args, **kwargs):
        found = get(*args, **kwargs)
        speak.wait(30)
        return found

    script(committer.catalog.store, get_tagged=stalling)
    assert versions(known) == ((), False)
    unscript(committer.catalog.store)
    entry = committer.commit(empty_record(committer, 1)).entry
    assert versions(known) == ((), False)  # the first request is still in progress
    speak.set()
    while not (answer := versions(known))[1]:
        pass
    assert answer == ((entry,), True)


def test_a_version_committed_during_a_read_stays_known(committer):
    known = VersionCache(committer.catalog, on_read=committer.notice)
    reads, speak, get = threading.Event(), threading.Event(), committer.catalog.store.get_tagged

    def slow(*args, **kwargs):
        found = get(*args, **kwargs)
        reads.set()
        speak.wait(30)
        return found

    script(committer.catalog.store, get_tagged=slow)
    with ThreadPoolExecutor(1) as restoring:
        reading = restoring.submit(known.root)
        assert reads.wait(30)
        unscript(committer.catalog.store)
        entry = committer.commit(empty_record(committer, 1)).entry
        known.committed(committer.root)
        speak.set()
        reading.result(30)
    script(committer.catalog.store, get_tagged=down)
    assert versions(known) == ((entry,), False)
    assert committer.root.versions == (entry,)


def test_a_commit_after_the_last_comparison_stays_known(committer):
    """The root that was read is older than that of a commit which ends just before the read root is noticed."""
    entries = list[Entry]()

    def late(root: Root) -> Root:
        entries.append(committer.commit(empty_record(committer, 1)).entry)
        return committer.notice(root)

    known = VersionCache(committer.catalog, on_read=late)
    assert [entry.id for entry in versions(known)[0]] == [1]
    assert committer.root.versions == known.entries == tuple(entries)


def test_a_root_older_than_the_one_read_last_is_not_taken(committer):
    known = VersionCache(committer.catalog, on_read=committer.notice)
    old = committer.root
    committer.commit(empty_record(committer, 1))
    read, _ = known.root()
    known.committed(old)
    assert known.entries == read.versions != ()
