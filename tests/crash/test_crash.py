"""Every process is killed (SIGKILL) at every point of a save, a commit, a segment of the step journal, retention, thinning,
compaction, rollback, collection, and the making of a repository.

After each kill the last committed version has every bit, nothing half is to be seen, the next save works without help, and a
collection leaves exactly the listed versions. ``make test`` takes a spread of the points, ``make soak`` all of them; on S3 it
plays an upload that is cut off, ``make test-s3`` everything. A trial that failed says how to run it alone:

    RAYSTOW_CRASH='save | coordinator | rename root.json #2 | coordinator' pytest tests/crash
"""

from __future__ import annotations

import os

import pytest
from campaign import another, everyone, itself, points, run
from trial import ACTS, Act, Stage
from trial_store import belonging

from raystow.storage.clock import SYSTEM
from raystow.storage.format import keys
from raystow.storage.repository import open_repository
from raystow.storage.retention.collect import CollectionPlan

SPREAD = {"create": 3, "save": 8, "journal": 3, "prune": 3, "thin": 3, "compact": 1, "rollback": 3, "gc": 4}
SPREAD_S3 = {"create": 1, "save": 2, "journal": 1, "prune": 1, "thin": 1, "compact": 1, "rollback": 1, "gc": 2}
REAL = "RAYSTOW_TEST_S3" in os.environ  # then there are more of them: it is many times faster than moto's server


@pytest.mark.parametrize("act", ACTS)
def test_killed_alone(on_disk: Stage, act: str) -> None:
    run(on_disk, act, itself, most=SPREAD[act])


def test_all_killed_at_once(on_disk: Stage) -> None:
    run(on_disk, "save", everyone, most=4)


def test_another_killed(on_disk: Stage) -> None:
    run(on_disk, "save", another, most=4)


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize("act", ACTS)
def test_killed_alone_on_s3(on_s3: Stage, act: str) -> None:
    run(on_s3, act, itself, most=SPREAD_S3[act] * (4 if REAL else 1))


@pytest.mark.slow
@pytest.mark.s3
def test_all_killed_at_once_on_s3(on_s3: Stage) -> None:
    run(on_s3, "save", everyone, most=5 if REAL else 1)


@pytest.mark.s3
def test_killed_in_the_middle_of_an_upload(on_s3: Stage) -> None:
    act = Act("upload", "two", lambda cluster: [])
    with on_s3.cluster(act, "upload") as cluster:
        repository, token = open_repository(cluster.uri), SYSTEM.token()
        key = keys.pack(9, token, 0, "weights", 0)

        def is_unfinished() -> bool:
            return any(write.key == key for write in repository.store.unfinished())

        def cut_off() -> CollectionPlan | None:
            """Start an upload and kill the writer when it is seen; None if requests that were under way have completed it."""
            cluster.start("writer", key=key, size=64 << 20)
            while not is_unfinished():
                pass
            cluster.end()
            while is_unfinished():  # the store tells its time in whole seconds, by which the upload may not have begun yet
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
def test_killed_alone_at_every_point(on_disk: Stage, act: str) -> None:
    run(on_disk, act, itself)


@pytest.mark.slow
def test_all_killed_at_once_at_every_point(on_disk: Stage) -> None:
    run(on_disk, "save", everyone)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["save", "journal"])
def test_another_killed_at_every_point(on_disk: Stage, act: str) -> None:
    run(on_disk, act, another, most=len(points(on_disk, act)))
