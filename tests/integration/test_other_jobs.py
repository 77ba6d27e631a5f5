"""Jobs with other settings of their stores, one after another and at once: actors outlive the job that made them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import boto3
import pytest
import ray
from key_gateway import key_gateway
from polling import wait_until
from ranks import Rank, every
from ray.cluster_utils import Cluster
from s3_server import moto

import raystow
from raystow.storage.clock import SYSTEM

BUCKET = "jobs"


class Job:
    """The environment of a job: a server and keys. Its ranks are processes with that environment."""

    def __init__(self, endpoint: str, key: str, **variables: str) -> None:
        keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": f"secret-of-{key}", "AWS_DEFAULT_REGION": "us-east-1"}
        self.environment = {**keys, "AWS_ENDPOINT_URL": endpoint, **variables}
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=key,
            aws_secret_access_key=f"secret-of-{key}",
            region_name="us-east-1",
        )

    def rank(self, node: str = "node_a") -> Any:
        """Start a training process of this job."""
        environment = {"env_vars": self.environment}
        return ray.remote(Rank).options(num_cpus=0, resources={node: 1}, runtime_env=environment).remote()

    def keys(self, prefix: str) -> list[str]:
        """The objects below a prefix of its server."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for entry in found.get("Contents", ())]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """Two servers with a bucket of the same name."""
    with moto() as first, moto() as second:
        for endpoint in (first, second):
            Job(endpoint, "testing").client.create_bucket(Bucket=BUCKET)
        yield first, second


@pytest.fixture
def uri() -> str:
    return f"s3://{BUCKET}/t-{SYSTEM.token()}"


def state(value: int) -> dict[str, Any]:
    import torch

    return {"w": torch.full((1000,), float(value)), "value": value}


def saved(rank: Any, value: int, step: int) -> int:
    """Save a state as a step, and return the version's id."""
    every([rank], "set", state, value)
    every([rank], "save", step)
    return int(every([rank], "result")[0].id)


def restored(rank: Any) -> int | None:
    """Restore the newest version, and return its value."""
    every([rank], "set", state, -1)
    if ray.get(rank.do.remote(lambda at: at.restore() is None), timeout=120):
        return None
    return int(ray.get(rank.do.remote(lambda at: at.state["value"] if at.state["w"][0] == at.state["value"] else -2)))


def test_the_same_address_at_another_endpoint_is_another_store(cluster: Cluster, servers: tuple[str, str], uri: str) -> None:
    """The second job once restored from the first job's server, and saved there. Both train at once."""
    first, second = Job(servers[0], "testing"), Job(servers[1], "testing")
    ranks = [first.rank(), second.rank()]
    ray.get(ranks[0].begin.remote(uri, 0, 1, {}), timeout=120)
    saved(ranks[0], 1, step=10)
    ray.get(ranks[1].begin.remote(uri, 0, 1, {}), timeout=120)
    assert restored(ranks[1]) is None
    saved(ranks[1], 2, step=20)
    saved(ranks[0], 3, step=11)
    assert [restored(rank) for rank in ranks] == [3, 2]
    steps = [ray.get(rank.do.remote(lambda _, uri=uri: [v.step for v in raystow.open(uri).versions()])) for rank in ranks]
    assert steps == [[10, 11], [20]]
    every(ranks, "leave")
    again = [second.rank(), first.rank()]  # the order in which their actors are made does not matter
    for rank in again:
        ray.get(rank.begin.remote(uri, 0, 1, {}), timeout=120)
    assert [restored(rank) for rank in again] == [2, 3]
    every(again, "leave")


def test_another_job_has_other_credentials(cluster: Cluster, servers: tuple[str, str], uri: str) -> None:
    """The actors of the first job once kept its credentials: ``ExpiredToken``, also for a new repository."""
    with key_gateway(servers[0], "first") as gateway:
        before = Job(gateway.endpoint, "first").rank()
        ray.get(before.begin.remote(uri, 0, 1, {}), timeout=120)
        saved(before, 1, step=1)
        gateway.accepted = {"second"}
        for where, expected in ((uri, 1), (f"{uri}/new", None)):
            after = Job(gateway.endpoint, "second").rank()
            ray.get(after.begin.remote(where, 0, 1, {}), timeout=120)
            assert restored(after) == expected
            saved(after, 2, step=2)
            assert restored(after) == 2
            every([after], "leave")
        every([before], "leave")


def keys_file(path: Path, key: str, seconds: float) -> None:
    """Write temporary keys, as a ``credential_process`` prints them."""
    end = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    keys = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": f"secret-of-{key}", "SessionToken": f"token-of-{key}"}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(keys | {"Expiration": end.isoformat()}))
    new.replace(path)


def test_temporary_credentials_are_renewed(cluster: Cluster, servers: tuple[str, str], uri: str, tmp_path: Path) -> None:
    """Only the job's process can renew them: no actor has its profile. In the end the first ones are refused."""
    keys, profile = tmp_path / "keys.json", tmp_path / "config"
    profile.write_text(f"[profile job]\ncredential_process = cat {keys}\nregion = us-east-1\n")
    keys_file(keys, "first", 12)
    with key_gateway(servers[0], "first", "second") as gateway:
        job = Job(gateway.endpoint, "first")
        job.environment = {"AWS_CONFIG_FILE": str(profile), "AWS_PROFILE": "job", "AWS_ENDPOINT_URL": gateway.endpoint}
        rank = job.rank()
        ray.get(rank.begin.remote(uri, 0, 1, {}), timeout=120)
        saved(rank, 1, step=1)
        assert gateway.keys_of("PUT", "pack|root") == {"first"}
        keys_file(keys, "second", 3600)
        steps = iter(range(2, 1000))

        def renewed() -> bool:
            saved(rank, 2, step=next(steps))
            return all("second" in gateway.keys_of("PUT", name) for name in (r"\.pack", r"root\.json"))

        wait_until(renewed, "uploads and commits with the renewed credentials", 60)
        gateway.accepted = {"second"}
        saved(rank, 3, step=next(steps))
        assert restored(rank) == 3
        every([rank], "leave")


def test_a_coordinator_that_is_restarted_gets_the_settings_again(cluster: Cluster, servers: tuple[str, str], uri: str) -> None:
    """Ray starts it again with the arguments of its constructor, which hold no credentials."""
    job = Job(servers[1], "testing")
    rank = job.rank()
    ray.get(rank.begin.remote(uri, 0, 1, {}), timeout=120)
    saved(rank, 1, step=1)
    ray.get(rank.do.remote(lambda at: ray.kill(at.checkpointer._port._known(), no_restart=False)))
    saved(rank, 2, step=2)
    assert restored(rank) == 2
    every([rank], "leave")


def test_no_credentials_are_in_what_ray_shows(cluster: Cluster, servers: tuple[str, str], uri: str) -> None:
    """Neither in names nor in environments of actors, nor in the logs of the cluster, nor in what is stored."""
    job = Job(servers[1], "testing", AWS_SECRET_ACCESS_KEY="not-for-others")
    rank = job.rank()
    ray.get(rank.begin.remote(uri, 0, 1, {}), timeout=120)
    saved(rank, 1, step=1)
    text = ray.get(rank.do.remote(lambda at: f"{at.checkpointer!r} {at.checkpointer._store.settings()!r}"))
    assert "not-for-others" not in text
    every([rank], "leave")
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert "not-for-others" not in str(names)
    prefix = uri.removeprefix(f"s3://{BUCKET}/")
    for key in job.keys(prefix):
        assert b"not-for-others" not in job.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    for log in folder.rglob("*"):
        if log.is_file() and ("actor" in log.name or "worker" in log.name):
            assert b"not-for-others" not in log.read_bytes(), log
