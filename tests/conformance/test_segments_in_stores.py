"""Segments of the step journal are written, replayed and collected in every store."""

from __future__ import annotations

from helpers.segment_run import SegmentRun, begin, record, replay, states

from raystow.storage.format import keys


def test_segments_are_replayed_and_collected_in_every_store(uri: str) -> None:
    run = SegmentRun(uri)
    training, journal = begin(run)
    record(run, journal, training, range(1, 5))
    run.start()
    assert replay(run) == (4, states(4)[4])
    second = run.root.segments[1]
    run.store.put(keys.segment_entries(second.number, second.attempt, 0), [b"torn"])
    run.start()
    assert replay(run) == (2, states(2)[2])
    run.save(2)
    run.repository.plan_collection(grace=0).execute()
    assert {keys.segment_of(info.key) for info in run.store.list(keys.SEGMENTS)} == {(second.number, second.attempt)}
    journal.close()
