"""A real Ray cluster of a head and two nodes on this machine, shared by the tests of this folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import ray
from ray.cluster_utils import Cluster

from integration.ranks import give_back
from raystow.orchestrator.export import version_files
from raystow.workers.packing import host_coding

if TYPE_CHECKING:
    from integration.gloo import Ranks
    from integration.ray_train_runs import Spares


@pytest.fixture(scope="session")
def cluster(beside_no_other: None) -> Iterator[Cluster]:
    """Start a head without CPUs and two nodes of two CPUs each; the resources ``node_a`` and ``node_b`` place actors on them."""
    # Actors import the modules of the tests.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    no_log_monitor = {"include_log_monitor": False}  # tests read no driver logs, and each node's log monitor starts slowly
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **no_log_monitor})
    for node in ("node_a", "node_b"):
        cluster.add_node(num_cpus=2, resources={node: 100}, **no_log_monitor)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written in slabs of 4 KiB, so that tensors span many slabs."""
    monkeypatch.setattr(version_files, "SLAB", 4096)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes for gloo groups, without Ray."""
    from integration.gloo import Ranks  # with torch

    ranks = Ranks(tmp_path_factory.mktemp("groups"))
    yield ranks
    ranks.close()


@pytest.fixture
def spares(cluster: Cluster) -> Iterator[Spares]:
    """Two spare nodes, and those that a test adds."""
    from integration.ray_train_runs import Spares  # with torch

    spares = Spares(cluster)
    spares.add()
    spares.add()
    yield spares
    for node in spares.nodes:
        cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A folder for a repository."""
    return str(tmp_path / "run")


@pytest.fixture(autouse=True)
def _release_ranks() -> Iterator[None]:
    """End the runs of each test when the test ends."""
    yield
    give_back()


@pytest.fixture
def coding_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node workers of this process have next to no core for coding, so that any store is faster."""
    monkeypatch.setattr(host_coding, "SHARE", 1e-6)
