"""Ray Train's workers: Train and the repository list the same versions, and a run continues from the newest, bit for bit."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from urllib.parse import quote

import boto3
import pytest
from helpers.polling import wait_until
from helpers.s3_server import moto
from pyarrow.fs import S3FileSystem
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

import raystow
from integration.ray_train_runs import Run, check, score, trainer
from raystow import ray_train


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train's cleaner queries the dashboard, which this cluster lacks, and ``fit`` would wait 12 s for the cleaner."""
    short = partialmethod(PlacementGroupCleanerCallback.__init__, stop_timeout=0.5)
    monkeypatch.setattr(PlacementGroupCleanerCallback, "__init__", short)


@pytest.mark.long
@pytest.mark.usefixtures("cluster", "short_timeout")
def test_a_worker_group_continues_after_a_worker_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # seconds between Train's health checks, instead of 2
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # it starts an actor per group; this run has no notice
    result = trainer(tmp_path, {"steps": 4, "die": 2}, num_to_keep=2).fit()
    assert [step for step, _, _ in Run(tmp_path).starts()] == [0, 2]
    repository = raystow.open(tmp_path / "ray" / "run" / "raystow")
    wait_until(lambda: [version.step for version in repository.versions()] == [3, 4], "versions are dropped after a commit")
    listed = [ray_train.version_of(checkpoint) for checkpoint, _ in result.best_checkpoints]
    assert listed == repository.versions()
    assert ray_train.version_of(result.checkpoint) == repository.latest()
    assert result.metrics == {"score": score(4)}
    for version in listed:
        repository.verify(version)
        check(version)


def test_a_checkpointer_outside_of_a_worker_is_refused() -> None:
    with pytest.raises(raystow.StateError, match="not a worker of Ray Train"):
        raystow.ray_train.Checkpointer()


@pytest.mark.long
@pytest.mark.usefixtures("cluster", "short_timeout")
@pytest.mark.parametrize("named", ["address", pytest.param("filesystem", marks=pytest.mark.slow)])
def test_trains_own_way_to_name_a_server_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """The environment names another server, or none. With an address, it has the keys."""
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    with moto() as server, moto() as other:
        where = {"endpoint_url": server, "region_name": "us-east-1"}
        client = boto3.client("s3", aws_access_key_id="k", aws_secret_access_key="s", **where)
        client.create_bucket(Bucket="runs")
        storage: dict[str, object] = {
            "storage_path": f"s3://k:s@runs/exp?endpoint_override={quote(server, safe='')}&region=us-east-1"
        }
        if named == "filesystem":
            made = S3FileSystem(access_key="k", secret_key="s", endpoint_override=server, region="us-east-1")
            storage = {"storage_path": "runs/exp", "storage_filesystem": made}
        monkeypatch.setenv("AWS_ENDPOINT_URL", other)
        result = trainer(tmp_path, {"steps": 2}, workers=1, **storage).fit()
        keys = [entry["Key"] for entry in client.list_objects_v2(Bucket="runs", Prefix="exp/run/raystow")["Contents"]]
        assert "exp/run/raystow/root.json" in keys
        version = ray_train.version_of(result.checkpoint)
        assert version.step == 2
        check(version)
        ray_train.prune(result)
