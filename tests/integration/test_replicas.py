"""Whole nodes die: their parts come from their partners' memory, or from the store; and the copies are made again."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ranks import every, start
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

import raystow
from raystow.storage.clock import SYSTEM
from raystow.workers.network.replication import Progress
from raystow.workers.node_actor import NAMESPACE


class Nodes:
    """A cluster whose nodes come and go."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes: dict[str, Any] = {}
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def add(self, *names: str) -> None:
        for name in names:
            self._nodes[name] = self._cluster.add_node(num_cpus=1, resources={name: 100}, labels={"zone": f"zone of {name}"})

    def kill(self, name: str) -> None:
        """As when the machine loses power."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def copies(self, name: str) -> Progress:
        """How far a node is with its copies; none of any if it has no worker."""
        try:
            worker = ray.get_actor(f"node-{self._nodes[name].node_id}", NAMESPACE)
            progress: Progress = ray.get(worker.copies.remote(), timeout=10)
            return progress
        except (ValueError, RayError):
            return Progress()

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    """A cluster of this test's own; the driver goes back to the common one afterwards."""
    ray.shutdown()
    nodes = Nodes()
    yield nodes
    nodes.close()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        SYSTEM.sleep(0.1)
    raise AssertionError("it never became true")


def complete(progress: Progress, nbytes: int = 1) -> bool:
    return progress.present == progress.wanted >= nbytes


def state(seed: int) -> dict[str, Any]:
    """Nothing like the one of any other seed."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(500_000, generator=generator) for i in range(4)}


def near(seed: int) -> dict[str, Any]:
    """Not far from any other: a difference to that is smaller."""
    return {name: tensor.view(torch.int32).add(seed).view(torch.float32) for name, tensor in state(0).items()}


Make = Callable[[int], dict[str, Any]]


def save(ranks: list[Any], seed: int, make: Make = state) -> None:
    every(ranks, "set", make, seed)
    every(ranks, "save", seed)
    every(ranks, "result")


def check_restored(ranks: list[Any], seed: int, make: Make = state) -> None:
    every(ranks, "set", make, -1)
    assert {version.step for version in every(ranks, "restore")} == {seed}
    for got in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60):
        assert all(torch.equal(got[name], tensor) for name, tensor in make(seed).items())


@pytest.mark.slow
@pytest.mark.parametrize("make", [state, near], ids=["a whole version", "a difference"])
def test_node_after_node_dies_and_the_memory_of_the_rest_is_enough(nodes: Nodes, tmp_path: Path, make: Make) -> None:
    nodes.add("a", "b")
    ranks = start(str(tmp_path), 2, nodes=("a", "b"))
    for seed in (1, 2):
        save(ranks, seed, make)
    assert bool(raystow.open(tmp_path).root().versions[-1].bases) == (make is near)
    until(lambda: complete(nodes.copies("a")) and complete(nodes.copies("b")))
    whole = nodes.copies("a").wanted + nodes.copies("b").wanted
    shutil.rmtree(tmp_path / "versions")

    nodes.kill("b")
    ray.kill(ranks[0])
    ranks = start(str(tmp_path), 2, nodes=("a",))
    check_restored(ranks, 2, make)
    until(lambda: (progress := nodes.copies("a")).wanted == whole and progress.present == 0)

    nodes.add("c")
    (newcomer,) = start(str(tmp_path), 1, nodes=("c",))
    until(lambda: complete(nodes.copies("a"), whole))

    nodes.kill("a")
    ray.kill(newcomer)
    check_restored(start(str(tmp_path), 2, nodes=("c",)), 2, make)


@pytest.mark.slow
def test_a_node_and_its_partner_die_and_the_store_has_all(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add("a", "b")
    ranks = start(str(tmp_path), 2, nodes=("a", "b"))
    save(ranks, 3)
    until(lambda: complete(nodes.copies("a")) and complete(nodes.copies("b")))
    nodes.kill("b")
    nodes.kill("a")
    nodes.add("c")
    check_restored(start(str(tmp_path), 2, nodes=("c",)), 3)
