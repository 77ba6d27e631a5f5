from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_ray import FakeRay

from raystow.orchestrator import ray_cluster
from raystow.storage.errors import ClusterError
from raystow.workers import head_node


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A cluster whose head node answers."""
    monkeypatch.setattr(head_node, "reach", lambda address: None)
    return FakeRay().replace(monkeypatch, "init", "is_initialized")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken", "refuses this process.*RAY_AUTH_MODE=token"),
        ("ray.exceptions.RpcError: no route", "no Ray cluster is running here: Failed to connect.*ray start --head"),
    ],
)
def test_a_refused_connection_names_its_remedy(fake_ray: FakeRay, reason: str, said: str) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(reason)  # as Ray 2.60 does

    fake_ray.init = refuse  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match=said):
        ray_cluster.connect("127.0.0.1:1")


def test_another_version_of_the_cluster_is_no_traceback(fake_ray: FakeRay) -> None:
    def refuse(**options: Any) -> None:
        raise RuntimeError("Version mismatch: the cluster was started with Python: 3.11.7")

    fake_ray.init = refuse  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match=r"cannot join the Ray cluster .*Python: 3\.11\.7.*use the cluster's versions"):
        ray_cluster.connect("127.0.0.1:1")
