"""Jobs with other settings of their stores, one after another and at once: actors outlive the job that made them."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
import ray
from helpers.azure_server import ACCOUNT, KEY, OTHER_ACCOUNT, OTHER_KEY, azure_server, connection_string, make_container
from helpers.gcs_server import gcs_proxy
from helpers.key_gateway import KeyGateway, key_gateway
from helpers.s3_server import moto
from ray.cluster_utils import Cluster

import raystow
from integration.ranks import Rank, every
from raystow.orchestrator.coordinator.ray_client import coordinator_name
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.settings import place_of
from raystow.workers.node.actor import NAMESPACE

BUCKET = "jobs"


class Job:
    """A job with its own variables: its ranks are processes that have them."""

    def __init__(self, **variables: str) -> None:
        self.variables = variables

    def rank(self, node: str = "node_a") -> Any:
        """Start a training process of this job."""
        environment = {"env_vars": self.variables}
        return ray.remote(Rank).options(num_cpus=0, resources={node: 1}, runtime_env=environment).remote()


def s3_job(endpoint: str, key: str, **variables: str) -> Job:
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": f"secret-of-{key}", "AWS_DEFAULT_REGION": "us-east-1"}
    return Job(**{**keys, "AWS_ENDPOINT_URL": endpoint, **variables})


def client(endpoint: str) -> Any:
    """A client of a server, apart from all jobs."""
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=endpoint, **keys)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """Two servers with a bucket of the same name."""
    with moto() as first, moto() as second:
        for endpoint in (first, second):
            client(endpoint).create_bucket(Bucket=BUCKET)
        yield first, second


@pytest.fixture(scope="module")
def two_jobs(cluster: Cluster, servers: tuple[str, str]) -> Iterator[tuple[Any, Any]]:
    """A rank each of two jobs, all of whose variables differ. Of their node's actors, the first job makes some."""
    with contextlib.ExitStack() as stack:
        variables = [dict(s3_job(endpoint, "testing").variables) for endpoint in servers]
        for number, job in enumerate(variables):
            job["STORAGE_EMULATOR_HOST"] = stack.enter_context(gcs_proxy(servers[number], BUCKET))
            job["GOOGLE_BEARER_TOKEN"] = f"secret-of-{number}"
        with contextlib.suppress(pytest.skip.Exception):  # without Azurite, those of the other stores are tested
            first = stack.enter_context(azure_server())
            second = first.replace(ACCOUNT, OTHER_ACCOUNT)
            for job, endpoint in zip(variables, (first, second), strict=True):
                make_container(endpoint, BUCKET)
                job["AZURE_STORAGE_CONNECTION_STRING"] = connection_string(endpoint)
                job["AZURE_STORAGE_ACCOUNT_KEY"] = KEY if endpoint == first else OTHER_KEY
        yield Job(**variables[0]).rank("node_b"), Job(**variables[1]).rank("node_b")


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


@pytest.mark.parametrize("kind", ["s3", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("az", "gs"))])
@pytest.mark.long
def test_the_same_address_at_another_endpoint_is_another_store(two_jobs: tuple[Any, Any], kind: str) -> None:
    """The second job once restored from the first job's server, and saved there. Both train at once. An address in Azure or
    Google was refused, since the node worker had the variables of the job that made it."""
    ranks, uri = list(two_jobs), f"{kind}://{BUCKET}/t-{SYSTEM.token()}"
    if kind == "az" and not ray.get(ranks[1].do.remote(lambda _: "AZURE_STORAGE_ACCOUNT_KEY" in os.environ)):
        pytest.skip("Azurite is not installed: make azurite (needs Node)")
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


@pytest.mark.long
def test_another_job_has_other_credentials(cluster: Cluster, servers: tuple[str, str], uri: str) -> None:
    """The actors of the first job once kept its credentials: ``ExpiredToken``, also for a new repository."""
    with key_gateway(servers[0], "first") as gateway:
        before = s3_job(gateway.endpoint, "first").rank()
        ray.get(before.begin.remote(uri, 0, 1, {}), timeout=120)
        saved(before, 1, step=1)
        gateway.accepted = {"second"}
        for where, expected in ((uri, 1), (f"{uri}/new", None)):
            after = s3_job(gateway.endpoint, "second").rank()
            ray.get(after.begin.remote(where, 0, 1, {}), timeout=120)
            assert restored(after) == expected
            saved(after, 2, step=2)
            assert restored(after) == 2
            every([after], "leave")
        every([before], "leave")


class ProcessKeys:
    """Keys that a ``credential_process`` prints."""

    def __init__(self, gateway: KeyGateway, folder: Path) -> None:
        self._gateway, self._file, profile = gateway, folder / "keys.json", folder / "config"
        profile.write_text(f"[profile job]\ncredential_process = cat {self._file}\n")
        self.variables = {"AWS_CONFIG_FILE": str(profile), "AWS_PROFILE": "job"}
        self.rotate()

    def rotate(self) -> None:
        """Let the server accept only keys that are issued from now on."""
        self._gateway.accepted.clear()
        keys = {"Version": 1, "SessionToken": "token", **self._gateway.issue()}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(keys))
        new.replace(self._file)


class WebIdentity:
    """Keys of a role that a token stands for, as on EKS."""

    def __init__(self, gateway: KeyGateway, folder: Path) -> None:
        token = folder / "token"
        token.write_text("the token of a service account")
        role = "arn:aws:iam::123456789012:role/training"
        self.variables = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": role}
        self.rotate = gateway.accepted.clear


class MachineRole:
    """Keys of the role of a machine."""

    def __init__(self, gateway: KeyGateway, folder: Path) -> None:
        self.variables = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": gateway.endpoint}
        self.rotate = gateway.accepted.clear


@pytest.fixture(scope="module")
def renewing_rank(cluster: Cluster) -> Any:
    return Job(AWS_SECRET_ACCESS_KEY="").rank()


def set_aws(_: Rank, variables: dict[str, str]) -> None:
    """Let a rank have these variables and no others of AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(variables)


@pytest.mark.parametrize("identity", [ProcessKeys, WebIdentity, MachineRole])
@pytest.mark.long
def test_refused_credentials_are_renewed(
    renewing_rank: Any, servers: tuple[str, str], uri: str, tmp_path: Path, identity: Any
) -> None:
    """Only the job's process can renew them: no actor has its identity. Saves failed with ``ExpiredToken``."""
    rank = renewing_rank
    with key_gateway(servers[0]) as gateway:
        keys = identity(gateway, tmp_path)
        variables = {"AWS_ENDPOINT_URL": gateway.endpoint, "AWS_DEFAULT_REGION": "us-east-1", **keys.variables}
        ray.get(rank.do.remote(set_aws, variables))
        ray.get(rank.begin.remote(uri, 0, 1, {}), timeout=120)
        saved(rank, 1, step=1)
        for number, place in enumerate([r"root\.json", r"\.pack", ""], start=2):  # of the coordinator, of the node worker, of all
            gateway.guarded = place
            keys.rotate()
            before = len(gateway.seen)
            saved(rank, number, step=number)
            used = [key for _, path, key in gateway.seen[before:] if key and re.search(place, path)]
            assert set(used) - gateway.accepted  # was refused
            assert used[-1] in gateway.accepted
        keys.rotate()
        assert restored(rank) == 4
        every([rank], "leave")


def kill_coordinator(rank: Rank) -> None:
    """Let Ray restart the coordinator of a rank."""
    name = coordinator_name(rank.checkpointer.uri, place_of(rank.checkpointer.repository.store))
    ray.kill(ray.get_actor(name, NAMESPACE), no_restart=False)


@pytest.mark.long
def test_a_coordinator_that_is_restarted_gets_the_settings_again(cluster: Cluster, servers: tuple[str, str], uri: str) -> None:
    """Ray starts it again with the arguments of its constructor, which hold no credentials."""
    rank = s3_job(servers[1], "testing").rank()
    ray.get(rank.begin.remote(uri, 0, 1, {}), timeout=120)
    saved(rank, 1, step=1)
    ray.get(rank.do.remote(kill_coordinator))
    saved(rank, 2, step=2)
    assert restored(rank) == 2
    every([rank], "leave")


def actor_processes(cluster: Cluster) -> list[psutil.Process]:
    """The node workers and coordinators of the cluster."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
    children = [child for raylet in raylets for child in psutil.Process(raylet).children()]
    return [child for child in children if re.search("NodeActor|CoordinatorActor", " ".join(child.cmdline()))]


@pytest.mark.long
def test_no_secrets_of_a_job_are_in_what_others_see(cluster: Cluster, servers: tuple[str, str], uri: str) -> None:
    """Neither in names and process images of actors, nor in the logs of the cluster, nor in what is stored."""
    before = [process.pid for process in actor_processes(cluster)]
    secrets = {"AWS_SECRET_ACCESS_KEY": "not-for-others", "WANDB_API_KEY": "not-for-others", "RAYSTOW_OTHER": "1"}
    rank = s3_job(servers[1], "testing", **secrets).rank()
    ray.get(rank.begin.remote(uri, 0, 1, {}), timeout=120)
    saved(rank, 1, step=1)
    text = ray.get(rank.do.remote(lambda at: f"{at.checkpointer!r} {at.checkpointer.repository.store.settings()!r}"))
    assert "not-for-others" not in text
    every([rank], "leave")
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert "not-for-others" not in str(names)
    actors = actor_processes(cluster)
    for process in actors:
        image = Path(f"/proc/{process.pid}")
        assert b"not-for-others" not in (image / "environ").read_bytes() + (image / "cmdline").read_bytes(), process
    inherited = [b"RAYSTOW_OTHER=1" in Path(f"/proc/{at.pid}/environ").read_bytes() for at in actors if at.pid not in before]
    assert inherited
    assert all(inherited)  # else this looks at the wrong place
    bucket, prefix = client(servers[1]), uri.removeprefix(f"s3://{BUCKET}/")
    for entry in bucket.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        assert b"not-for-others" not in bucket.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    for log in folder.rglob("*"):
        if log.is_file() and ("actor" in log.name or "worker" in log.name):
            assert b"not-for-others" not in log.read_bytes(), log
