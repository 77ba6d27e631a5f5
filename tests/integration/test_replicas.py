"""Nodes die: their parts are read from their partners' memory or from the store, and copies are made again."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.builders import layers
from helpers.polling import wait_until
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

import raystow
from integration.ranks import every, save_state, start
from raystow.workers.node.actor import NAMESPACE
from raystow.workers.protocol.messages import ReplicationProgress

SIZE = 500_000
"""Elements in each layer."""


class Nodes:
    """A cluster to which tests add nodes and in which they kill nodes."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes: dict[str, Any] = {}
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def add(self, *names: str) -> None:
        for name in names:
            self._nodes[name] = self._cluster.add_node(num_cpus=1, resources={name: 100}, labels={"zone": f"zone of {name}"})

    def kill(self, name: str) -> None:
        """Remove a node without notice, as if its machine lost power."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def copies(self, name: str) -> ReplicationProgress:
        """Return the progress of a node's replication; an empty progress if the node has no worker."""
        try:
            worker = ray.get_actor(f"node-{self._nodes[name].node_id}", NAMESPACE)
            progress: ReplicationProgress = ray.get(worker.copies.remote(), timeout=10)
            return progress
        except (ValueError, RayError):
            return ReplicationProgress()

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    """Start a cluster for one test; afterwards the driver reconnects to the shared cluster."""
    ray.shutdown()
    nodes = Nodes()
    yield nodes
    nodes.close()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)


def complete(progress: ReplicationProgress, nbytes: int = 1) -> bool:
    return progress.present == progress.wanted >= nbytes


independent = functools.partial(layers, size=SIZE)


def near(seed: int) -> dict[str, Any]:
    """Return a state close to that of every other seed, so that a delta is smaller."""
    return {name: tensor.view(torch.int32).add(seed).view(torch.float32) for name, tensor in layers(0, SIZE).items()}


Make = Callable[[int], dict[str, Any]]


def check_restored(ranks: list[Any], seed: int, make: Make = independent) -> None:
    every(ranks, "set", make, -1)
    assert {version.step for version in every(ranks, "restore")} == {seed}
    for got in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60):
        assert all(torch.equal(got[name], tensor) for name, tensor in make(seed).items())


@pytest.mark.slow
@pytest.mark.parametrize("make", [independent, near], ids=["a whole version", "a difference"])
def test_memory_suffices_if_nodes_die_one_by_one(nodes: Nodes, tmp_path: Path, make: Make) -> None:
    nodes.add("a", "b")
    ranks = start(str(tmp_path), 2, nodes=("a", "b"))
    for seed in (1, 2):
        save_state(ranks, seed, make)
    assert bool(raystow.open(tmp_path).root().versions[-1].bases) == (make is near)
    wait_until(lambda: complete(nodes.copies("a")) and complete(nodes.copies("b")), "both nodes have all copies")
    whole = nodes.copies("a").wanted + nodes.copies("b").wanted
    shutil.rmtree(tmp_path / "versions")

    nodes.kill("b")
    ray.kill(ranks[0])
    ranks = start(str(tmp_path), 2, nodes=("a",))
    check_restored(ranks, 2, make)
    wait_until(
        lambda: (progress := nodes.copies("a")).wanted == whole and progress.present == 0, "node a is to copy all, and has none"
    )

    nodes.add("c")
    (newcomer,) = start(str(tmp_path), 1, nodes=("c",))
    wait_until(lambda: complete(nodes.copies("a"), whole), "node a has all copies")

    nodes.kill("a")
    ray.kill(newcomer)
    check_restored(start(str(tmp_path), 2, nodes=("c",)), 2, make)


@pytest.mark.slow
def test_the_store_is_read_if_a_node_and_its_partner_die(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add("a", "b")
    ranks = start(str(tmp_path), 2, nodes=("a", "b"))
    save_state(ranks, 3, layers, SIZE)
    wait_until(lambda: complete(nodes.copies("a")) and complete(nodes.copies("b")), "both nodes have all copies")
    nodes.kill("b")
    nodes.kill("a")
    nodes.add("c")
    check_restored(start(str(tmp_path), 2, nodes=("c",)), 3)
