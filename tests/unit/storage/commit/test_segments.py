"""Segments of the step journal: nodes write them, a commit includes all ranks, and they are replayed after the loss of all
memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers.scripted_store import ScriptedStore, script, unscript
from helpers.segment_run import SegmentRun, Training, begin, record, replay, states

from raystow.orchestrator.coordinator.segments import OpenedSegment, segment_record
from raystow.orchestrator.journal.journal import Journal
from raystow.storage.checks.repair import plan_repair
from raystow.storage.coding.digest import stored_digest
from raystow.storage.commit.segments import put_segment, read_record
from raystow.storage.errors import Damaged, SaveFailed, StoreUnavailable, Untrusted
from raystow.storage.format import keys, records
from raystow.storage.format.signature import Signer, Trust
from raystow.storage.object_store import Buffer
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.journal.segment_writer import read_entry
from raystow.workers.protocol.messages import EntryInfo, EntryPlace, Generation, StoredEntry


def test_training_continues_from_the_store(tmp_path: Path) -> None:
    """Training is interrupted twice, so the second replay reads segments of two generations."""
    run = SegmentRun(tmp_path)
    for first, last, durable in ((1, 5, 4), (5, 9, 8)):
        training = Training()
        journal = Journal(run.recorder(training))
        assert journal.replay() == (first - 1 or None)
        record(run, journal, training, range(first, last + 1))
        journal.close()
        assert run.durable[-1] == durable
        run.start()
    assert replay(run) == (8, states(8)[8])


def test_a_segment_has_the_entries_of_all_ranks(tmp_path: Path) -> None:
    run = SegmentRun(tmp_path, world_size=2)
    trainings = [Training(rank) for rank in range(2)]
    journals = [Journal(run.recorder(training, rank)) for rank, training in enumerate(trainings)]
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
    """A store that refuses the entries of a segment while it is ``full``."""

    def __init__(self, store: Any) -> None:
        self.inner, self.full = store, True

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        if self.full and keys.segment_of(key):
            raise StoreUnavailable("the disk is full", subject=key)
        self.inner.put(key, parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_the_next_segment_includes_a_failed_upload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training continues after the failed upload."""
    run = SegmentRun(tmp_path)
    run.store = store = FullStore(run.repository.store)
    training, journal = begin(run)
    record(run, journal, training, range(1, 4))
    assert run.durable == []
    assert "steps up to 2 are not durable yet" in caplog.text
    store.full = False
    record(run, journal, training, range(4, 6))
    journal.close()
    run.start()
    assert replay(run) == (4, states(4)[4])


def test_a_version_removes_segments(tmp_path: Path) -> None:
    """Segments up to the step of the version are removed; a collection deletes their objects."""
    run = SegmentRun(tmp_path)
    training, journal = begin(run)
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
    training, journal = begin(run, 0)
    record(run, journal, training, range(1, 4))
    opened = run.segments.open(run.memories[0].own()[-1])
    assert run.durable == [2]
    assert opened.number
    run.repository.rollback("latest")
    assert run.durable == []
    training.step(4)
    journal.record(4)
    journal.flush()
    run.writers[0].step()  # complete the segment that was opened before the rollback
    assert run.durable == []
    run.write()
    assert run.durable == [4]
    journal.close()


def test_durable_entries_are_evicted_for_new_ones(tmp_path: Path) -> None:
    run = SegmentRun(tmp_path)
    training, journal = begin(run)
    record(run, journal, training, range(1, 4))
    run.memories[0].budget = run.memories[0].used
    record(run, journal, training, range(4, 8))
    assert not journal.save_advised
    assert run.durable == [2, 4, 6]
    journal.close()
    run.start()
    assert replay(run) == (6, states(6)[6])


def test_a_repair_restores_segments() -> None:
    run = SegmentRun(ScriptedStore.named(SYSTEM.token()).uri)
    training, journal = begin(run)
    record(run, journal, training, range(1, 5))
    journal.close()
    before = run.root.segments
    run.repository.store.delete([keys.ROOT])
    store, read = run.repository.store, list[str]()
    get = store.get
    script(store, get=lambda key, *, max_bytes: read.append(key) or get(key, max_bytes=max_bytes))
    repair = plan_repair(store)
    unscript(store)
    assert [key for key in read if keys.segment_of(key)] == [keys.segment_record(one.number, one.attempt) for one in before]
    repair.execute()
    assert run.root.segments == before
    run.start()
    assert replay(run) == (4, states(4)[4])


def test_repeated_steps_are_stored_again(tmp_path: Path) -> None:
    """The steps after a damaged segment are repeated, and replace the segment of the old history."""
    run = SegmentRun(tmp_path)
    training, journal = begin(run)
    record(run, journal, training, range(1, 5))
    journal.close()
    lost = run.root.segments[1]
    run.store.put(keys.segment_entries(lost.number, lost.attempt, 0), [b"torn"])
    run.start()
    training = Training()
    journal = Journal(run.recorder(training))
    assert journal.replay() == 2
    record(run, journal, training, range(3, 7))
    journal.close()
    run.start()
    assert replay(run) == (6, states(6)[6])


def test_a_segment_with_a_missing_step_is_refused() -> None:
    """A faulty node could report a rank without one of the steps."""
    infos = [EntryInfo("r", 0, 1, step, step - 1, (Generation("g", 1),), 9, bytes(32)) for step in (1, 2, 3)]
    whole = tuple(infos)
    for left_out in range(3):
        parts = {0: (*whole[:left_out], *whole[left_out + 1 :])}
        with pytest.raises(SaveFailed, match="do not lead from step 0 to 3"):
            segment_record(OpenedSegment(1, "a" * 16, infos[-1], 0, 0.0, 0, parts), "r", 1, 0, SYSTEM)
    made = segment_record(OpenedSegment(1, "a" * 16, infos[-1], 0, 0.0, 0, {0: whole}), "r", 1, 0, SYSTEM)
    assert [one.step for one in made.steps] == [1, 2, 3]


def test_an_entry_that_was_changed_in_memory_is_not_stored(tmp_path: Path) -> None:
    """Else the coordinator would sign it."""
    run = SegmentRun(tmp_path)
    training, journal = begin(run)
    record(run, journal, training, range(1, 4))
    for entry in run.memories[0]._lines[run.repository.id, 1, 0].values():
        entry.content = memoryview(bytes([entry.content[0] ^ 1]) + bytes(entry.content[1:]))
    record(run, journal, training, range(4, 5))
    journal.close()
    assert run.durable == [2]


def test_an_entry_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    store = SegmentRun(tmp_path).store
    info = EntryInfo("r", 0, 1, 1, 0, (Generation("g", 1),), 5, stored_digest(b"entry"))
    place = EntryPlace(info, (), StoredEntry(1, "a" * 16, 0, 1))
    store.put(keys.segment_entries(1, "a" * 16, 0), [b"-entry-"])
    read = bytearray(5)
    read_entry(store, place, memoryview(read))
    assert read == b"entry"
    store.put(keys.segment_entries(1, "a" * 16, 0), [b"-entrx-"])
    with pytest.raises(Damaged, match="does not have its digest"):
        read_entry(store, place, memoryview(read))


def test_a_segment_is_signed_like_a_version(tmp_path: Path) -> None:
    """The signature of a version with the same number, attempt, and digest is invalid for the segment."""
    run, ours = SegmentRun(tmp_path), Signer(Ed25519PrivateKey.generate())
    store, id, trust = run.store, run.repository.id, Trust((ours.public,))
    info = EntryInfo(id, 0, 1, 1, 0, (Generation("g", 1),), 9, bytes(32))
    made = segment_record(OpenedSegment(1, "a" * 16, info, 0, 0.0, 0, {0: (info,)}), id, 1, 0, SYSTEM)
    segment = put_segment(store, made, ours)
    assert read_record(store, id, segment, trust) == made
    forged = json.loads(ours.sign(id, 1, "a" * 16, bytes.fromhex(segment.digest)))
    fields = {name: forged[name] for name in ("key", "algorithm", "signature")}
    store.put(keys.segment_signature(1, "a" * 16), [records.dump(fields, keys.segment_signature(1, "a" * 16))])
    with pytest.raises(Untrusted, match="over segment 1"):
        read_record(store, id, segment, trust)
    put_segment(store, made, None)
    store.delete([keys.segment_signature(1, "a" * 16)])
    with pytest.raises(Untrusted, match="segment 1 is not signed"):
        read_record(store, id, segment, trust)
