"""Segments of the step journal: written by nodes, committed for the whole world, replayed after all memory is lost."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from segment_run import SegmentRun, Training, record, replay, states

from raystow.storage.errors import StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.object_store import Buffer
from raystow.storage.repair import plan_repair


def test_a_training_continues_from_the_store(tmp_path: Path) -> None:
    """Twice, so that the second replay follows segments of two generations."""
    run = SegmentRun(tmp_path)
    for first, last, durable in ((1, 5, 4), (5, 9, 8)):
        training = Training()
        journal = run.journal(training)
        assert journal.replay() == (first - 1 or None)
        record(run, journal, training, range(first, last + 1))
        journal.close()
        assert run.durable[-1] == durable
        run.start()
    assert replay(run) == (8, states(8)[8])


def test_all_ranks_are_in_a_segment_or_none(tmp_path: Path) -> None:
    run = SegmentRun(tmp_path, world_size=2)
    trainings = [Training(rank) for rank in range(2)]
    journals = [run.journal(training, rank) for rank, training in enumerate(trainings)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda journal: journal.replay(), journals))
    for number in (1, 2, 3):
        for training, journal in zip(trainings, journals, strict=True):
            training.step(number)
            journal.record(number)
            journal.flush()
    run.writers[0].step()
    run.writers[0].step()
    assert run.durable == []
    run.writers[1].step()
    assert run.durable == [2]
    for journal in journals:
        journal.close()


class FullStore:
    """Refuses the entries of a segment, as long as it is ``full``."""

    def __init__(self, store: Any) -> None:
        self.inner, self.full = store, True

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        if self.full and keys.segment_of(key):
            raise StoreUnavailable("the disk is full", subject=key)
        self.inner.put(key, parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_failed_upload_is_made_up_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the next segment, and the training goes on."""
    run = SegmentRun(tmp_path)
    run.store = store = FullStore(run.repository.store)
    training = Training()
    journal = run.journal(training)
    journal.replay()
    record(run, journal, training, range(1, 4))
    assert run.durable == []
    assert "steps up to 2 are not durable yet" in caplog.text
    store.full = False
    record(run, journal, training, range(4, 6))
    journal.close()
    run.start()
    assert replay(run) == (4, states(4)[4])


def test_a_version_removes_segments(tmp_path: Path) -> None:
    """Those up to its step; a collection deletes their objects."""
    run = SegmentRun(tmp_path)
    training = Training()
    journal = run.journal(training)
    journal.replay()
    record(run, journal, training, range(1, 7))
    assert run.durable == [2, 4, 6]
    run.save(4)
    assert run.durable == [6]
    run.repository.plan_collection(grace=0, dropped_only=True).execute()
    left = {keys.segment_of(info.key) for info in run.repository.store.list(keys.SEGMENTS)}
    assert left == {(one.number, one.attempt) for one in run.root.segments}
    journal.close()


def test_a_rollback_removes_all_segments(tmp_path: Path) -> None:
    run = SegmentRun(tmp_path)
    run.save(0)
    training = Training()
    journal = run.journal(training)
    journal.restored(0, True)
    journal.replay()
    record(run, journal, training, range(1, 4))
    opened = run.segments.open(run.memories[0].own()[-1])
    assert run.durable == [2]
    assert opened.number
    run.repository.rollback("latest")
    assert run.durable == []
    training.step(4)
    journal.record(4)
    journal.flush()
    run.writers[0].step()  # completes the segment that was opened before the rollback
    assert run.durable == []
    run.write()
    assert run.durable == [4]
    journal.close()


def test_entries_in_the_store_make_place_for_new_ones(tmp_path: Path) -> None:
    run = SegmentRun(tmp_path)
    training = Training()
    journal = run.journal(training)
    journal.replay()
    record(run, journal, training, range(1, 4))
    run.memories[0].budget = run.memories[0].used
    record(run, journal, training, range(4, 8))
    assert not journal.save_advised
    assert run.durable == [2, 4, 6]
    journal.close()
    run.start()
    assert replay(run) == (6, states(6)[6])


def test_a_repair_brings_segments_back(tmp_path: Path) -> None:
    run = SegmentRun(tmp_path)
    training = Training()
    journal = run.journal(training)
    journal.replay()
    record(run, journal, training, range(1, 5))
    journal.close()
    before = run.root.segments
    run.repository.store.delete([keys.ROOT])
    plan_repair(run.repository.store).execute()
    assert run.root.segments == before
    run.start()
    assert replay(run) == (4, states(4)[4])
