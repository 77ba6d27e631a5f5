"""Jobs with other settings of their stores, one after another and at once: actors outlive the job that made them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import ray
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
