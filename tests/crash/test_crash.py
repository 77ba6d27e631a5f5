"""Every process is killed (SIGKILL) at every point of a save, a save with a part, a commit, a segment of the step journal,
retention, thinning, compaction, rollback, collection, and the creation of a repository.

After each kill, every bit of the last committed version is intact, no incomplete version is visible, the next save works without
help, and a collection leaves exactly the listed versions. ``make test`` runs a selection of the points, ``make soak`` runs all.
On S3, ``make test`` runs an interrupted upload, and ``make test-s3`` all trials. A failed trial prints how to run it alone:

    RAYSTOW_CRASH='save | coordinator | rename root.json #2 | coordinator' pytest tests/crash
"""

from __future__ import annotations

import os

import pytest

from crash.campaign import another, everyone, itself, points, run, the_part
from crash.trial import ACTS, Act, Stage
from crash.trial_store import belonging
from raystow.storage.format import keys
from raystow.storage.repository import open_repository
from raystow.storage.retention.collect import CollectionPlan
from raystow.storage.runtime.clock import SYSTEM

SPREAD = {"create": 3, "save": 8, "parts": 2, "journal": 3, "prune": 3, "thin": 3, "compact": 1, "rollback": 3, "gc": 4}
SPREAD_S3 = {"create": 1, "save": 2, "parts": 1, "journal": 1, "prune": 1, "thin": 1, "compact": 1, "rollback": 1, "gc": 2}
REAL = "RAYSTOW_TEST_S3" in os.environ  # more trials: a real server is many times faster than moto's


@pytest.mark.parametrize("act", ACTS)
def test_a_killed_process_loses_no_version(on_disk: Stage, act: str) -> None:
    run(on_disk, act, itself, most=SPREAD[act])


def test_kills_of_all_processes_lose_no_version(on_disk: Stage) -> None:
    run(on_disk, "save", everyone, most=4)


def test_a_kill_of_another_process_loses_no_version(on_disk: Stage) -> None:
    run(on_disk, "save", another, most=4)


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize("act", ACTS)
def test_a_killed_process_loses_no_version_on_s3(on_s3: Stage, act: str) -> None:
    run(on_s3, act, itself, most=SPREAD_S3[act] * (4 if REAL else 1))


@pytest.mark.slow
@pytest.mark.s3
def test_kills_of_all_processes_lose_no_version_on_s3(on_s3: Stage) -> None:
    run(on_s3, "save", everyone, most=5 if REAL else 1)


@pytest.mark.s3
def test_an_interrupted_upload_is_collected(on_s3: Stage) -> None:
    act = Act("upload", "two", lambda cluster: [])
    with on_s3.cluster(act, "upload") as cluster:
        repository, token = open_repository(cluster.uri), SYSTEM.token()
        key = keys.pack(9, token, 0, "weights", 0)

        def is_unfinished() -> bool:
            return any(write.key == key for write in repository.store.unfinished())

        def cut_off() -> CollectionPlan | None:
            """Start an upload and kill the writer when the upload is visible; return None if requests in flight have completed
            it."""
            cluster.start("writer", key=key, size=64 << 20)
            while not is_unfinished():
                pass
            cluster.end()
            while is_unfinished():  # the store's clock has whole seconds, so the upload may be newer than its time
                if (plan := repository.plan_collection(grace=0.0)).unfinished:
                    return plan
            return None

        while (plan := cut_off()) is None:
            pass
        assert key in on_s3.place.everything(cluster.uri)
        plan.execute()
        assert on_s3.place.everything(cluster.uri) == belonging(repository)


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
def test_a_kill_at_every_point_loses_no_version(on_disk: Stage, act: str) -> None:
    run(on_disk, act, itself)


@pytest.mark.slow
def test_kills_of_all_at_every_point_lose_no_version(on_disk: Stage) -> None:
    run(on_disk, "save", everyone)


@pytest.mark.slow
def test_kills_of_a_part_at_every_point_lose_no_version(on_disk: Stage) -> None:
    run(on_disk, "parts", the_part)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["save", "journal"])
def test_a_kill_of_another_at_every_point_loses_no_version(on_disk: Stage, act: str) -> None:
    run(on_disk, act, another, most=len(points(on_disk, act)))
