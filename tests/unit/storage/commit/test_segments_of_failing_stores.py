"""A store fails at each operation of the commit of a segment, before the operation or after it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from helpers.segment_run import SegmentRun, begin, record, replay, states

from raystow.storage.commit.segments import read_record, verify_segment
from raystow.storage.errors import StoreUnavailable
from raystow.storage.repository import Repository

_OPERATIONS = ("get", "get_range", "put", "get_tagged", "put_if", "list")


class FailingStore:
    """A store that fails operation number ``at``. If ``late``, the operation is done before the error. ``passed``: operations
    so far.
    """

    def __init__(self, store: Any) -> None:
        self.inner, self.at, self.late, self.passed = store, 0, False, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return functools.partial(self._play, found) if name in _OPERATIONS else found

    def _play(self, operation: Any, *args: Any, **more: Any) -> Any:
        self.passed += 1
        fails = self.passed == self.at
        if fails and not self.late:
            raise StoreUnavailable("it was not reached")
        result = operation(*args, **more)
        if fails:
            raise StoreUnavailable("it did not answer")
        return result


@pytest.mark.parametrize("late", [False, True])
def test_segments_survive_a_failure_of_each_operation(tmp_path: Path, late: bool) -> None:
    """The steps become durable with this segment or with the next one, and each segment is intact."""
    at, operations = -1, 1  # the first round has no failure and counts the operations
    while at < operations:
        at += 1
        run = SegmentRun(tmp_path / str(at))
        healthy = run.repository
        run.store = store = FailingStore(healthy.store)  # type: ignore[assignment]
        run.repository = Repository(store, healthy.id)  # type: ignore[arg-type]
        run.start()
        training, journal = begin(run)
        record(run, journal, training, range(1, 3))
        before, store.at, store.late = store.passed, store.passed + at if at else 0, late
        record(run, journal, training, range(3, 5))
        operations = operations if at else store.passed - before
        assert run.durable in ([2], [2, 4])
        record(run, journal, training, range(5, 7))
        journal.close()
        for segment in healthy.root().segments:
            verify_segment(healthy.store, read_record(healthy.store, healthy.id, segment, healthy.trust), deep=True)
        run.start()
        assert replay(run) == (6, states(6)[6])
    assert operations >= 5  # the entries, the record, the check of both, and the read and the swap of the root
