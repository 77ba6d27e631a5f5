"""Copies of segments of the step journal: training continues from a replica at the last durable step of its source."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.segment_run import SegmentRun, begin, record, states

from raystow.orchestrator.coordinator.segments import Segments
from raystow.storage.commit.committer import Committer
from raystow.storage.commit.segments import read_record
from raystow.storage.copies.copy import plan_copy
from raystow.storage.errors import Damaged
from raystow.storage.format import key_files, keys
from raystow.storage.format.signature import Trust
from raystow.storage.repository import open_repository
from raystow.storage.runtime.clock import SYSTEM


@pytest.fixture
def there() -> str:
    return f"memory://replica-{SYSTEM.token()}"


@pytest.fixture
def run(tmp_path: Path) -> SegmentRun:
    """Return a repository with the version of step 0, and with the steps 1 to 4 in two segments."""
    run = SegmentRun(tmp_path)
    run.save(0)
    training, journal = begin(run, 0)
    record(run, journal, training, range(1, 5))
    journal.close()
    return run


def copy(run: SegmentRun, there: str, *versions: int, sign: bool = False) -> list[int]:
    """Copy versions and segments. Return the last steps of the segments of the replica."""
    plan_copy(run.repository.uri, there, versions or None, sign=sign).execute()
    return [one.step for one in open_repository(there).root().segments]


def test_training_continues_from_the_replica(run: SegmentRun, there: str) -> None:
    """It continues at the last durable step. A second copy transfers the new segments only."""
    assert copy(run, there) == [2, 4]
    run.start()
    training, journal = begin(run, 0)
    record(run, journal, training, range(5, 7))
    journal.close()
    assert plan_copy(run.repository.uri, there, []).segments == (), "no version is asked for"
    plan = plan_copy(run.repository.uri, there)
    assert [one.step for one in plan.segments] == [6]
    plan.execute()
    training, journal = begin(SegmentRun(there), 0)
    journal.close()
    assert training.bits() == states(6)[6]


def test_a_copied_version_removes_segments(run: SegmentRun, there: str) -> None:
    assert copy(run, there) == [2, 4]
    run.save(2)
    assert copy(run, there) == [4]


def test_an_older_version_is_copied_without_segments(run: SegmentRun, there: str) -> None:
    run.save(2)
    assert copy(run, there, 1) == []
    assert copy(run, there) == [4]


def test_a_rollback_removes_copied_segments(run: SegmentRun, there: str) -> None:
    """The segments are removed even if the newest version does not change."""
    assert copy(run, there) == [2, 4]
    run.repository.rollback("latest")
    assert copy(run, there) == []


def test_a_replica_has_had_fewer_rollbacks(run: SegmentRun, there: str) -> None:
    """Its segments are replayed nevertheless: there are none from before a rollback."""
    assert copy(run, there) == [2, 4]
    for _ in range(2):
        run.repository.rollback("latest")
    run.start()
    training, journal = begin(run, 0)
    record(run, journal, training, range(1, 3))
    journal.close()
    assert copy(run, there) == [2]
    assert open_repository(there).root().rollbacks < run.root.rollbacks
    training, journal = begin(SegmentRun(there), 0)
    journal.close()
    assert training.bits() == states(2)[2]


def test_a_damaged_entry_is_not_copied(run: SegmentRun, there: str) -> None:
    second = run.root.segments[1]
    key = keys.segment_entries(second.number, second.attempt, 0)
    content = bytearray(run.store.get(key, max_bytes=1 << 30))
    content[-1] ^= 1
    run.store.put(key, [content])
    with pytest.raises(Damaged, match="does not have its digest"):
        copy(run, there)
    assert [one.step for one in open_repository(there).root().segments] == [2]


def test_missing_entries_of_a_segment_are_damage(run: SegmentRun, there: str) -> None:
    """``NotFound`` would say that a version was dropped, and `raystow cp --watch` would try again without end."""
    first = run.root.segments[0]
    key = keys.segment_entries(first.number, first.attempt, 0)
    run.store.delete([key])
    with pytest.raises(Damaged, match="missing") as caught:
        copy(run, there)
    assert caught.value.subject == key


def test_a_segment_replaced_by_a_version_is_not_copied(run: SegmentRun, there: str) -> None:
    """The segment is collected during the copy."""
    plan = plan_copy(run.repository.uri, there)
    run.save(2)
    run.repository.plan_collection(grace=0).execute()
    plan.execute()
    assert open_repository(there).root().segments == ()
    assert copy(run, there) == [4]


@pytest.mark.parametrize("sign", [False, True])
def test_signatures_of_segments_are_kept_or_renewed(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: bool
) -> None:
    """The signatures of segments are treated like those of versions."""
    keys_made = [key_files.write_pair(tmp_path / name) for name in ("training", "copies")]
    run = SegmentRun(tmp_path / "signed")
    monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "training"))
    run.committer = Committer(run.repository, SYSTEM.token(), key_files.signer())
    run.segments = Segments(run.committer, SYSTEM)
    training, journal = begin(run)
    record(run, journal, training, range(1, 3))
    journal.close()
    if sign:
        monkeypatch.setenv(key_files.SIGNING_KEY, str(tmp_path / "copies"))
        monkeypatch.setenv(key_files.TRUSTED_KEYS, str(tmp_path))  # the folder has both public keys
    else:
        monkeypatch.delenv(key_files.SIGNING_KEY)
    assert copy(run, there, sign=sign) == [2]
    replica = open_repository(there)
    (segment,) = replica.root().segments
    assert read_record(replica.store, replica.id, segment, Trust((keys_made[sign],))).steps
