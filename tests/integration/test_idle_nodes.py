"""A node that no training uses any more is idle for Ray, as if raystow had never run there, and can be used again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from helpers.builders import layers
from helpers.polling import wait_until
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import NodeStatus

import raystow
from integration.ranks import every, save_state, start, take
from raystow.workers.node.actor import NAMESPACE, NODE

NAME = "node_c"
SIZE = 10_000


@pytest.fixture
def node(cluster: Cluster) -> Iterator[str]:
    """Add a node to the cluster; return its id."""
    added = cluster.add_node(num_cpus=2, resources={NAME: 100}, include_log_monitor=False)
    yield added.node_id
    cluster.remove_node(added)


def is_idle(cluster: Cluster, node: str) -> bool:
    """Whether an autoscaler may give the node back."""
    state = get_cluster_resource_state(GcsClient(address=cluster.address))
    (here,) = [one for one in state.node_states if one.node_id.hex() == node]
    return here.status == NodeStatus.IDLE and here.idle_duration_ms > 0


def worker(node: str) -> Any:
    return ray.get_actor(f"{NODE}{node}", NAMESPACE)


def let_time_pass(actor: Any) -> None:
    """Make as much time pass for a node worker, once its processes have left, as it waits for others."""
    usage = actor.node.usage
    wait_until(lambda: not usage.visits, "the end of all connections")
    before = usage.clock
    usage.clock = SimpleNamespace(monotonic=lambda: before.monotonic() + 1e6)


def restored(rank: Any, step: int) -> bool:
    every([rank], "set", layers, -1, SIZE)
    every([rank], "restore")
    state = ray.get(rank.do.remote(lambda rank: rank.state), timeout=60)
    return all(torch.equal(state[name], tensor) for name, tensor in layers(step, SIZE).items())


def begun(uri: str) -> Any:
    rank = take(NAME)
    ray.get(rank.begin.remote(uri, 0, 1, {}), timeout=120)
    return rank


@pytest.mark.long
@pytest.mark.parametrize("hurry", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_node_is_idle_after_its_last_training(cluster: Cluster, node: str, tmp_path: Path, hurry: bool) -> None:
    wait_until(lambda: is_idle(cluster, node), "an idle node without raystow")
    (rank,) = start(str(tmp_path), 1, nodes=(NAME,))
    save_state([rank], 1, layers, SIZE)
    every([rank], "leave")
    ray.kill(rank)
    if hurry:
        ray.get(worker(node).__ray_call__.remote(let_time_pass), timeout=60)
    wait_until(lambda: is_idle(cluster, node), "an idle node", 60)
    late = begun(str(tmp_path))
    assert restored(late, 1)
    save_state([late], 2, layers, SIZE)
    assert raystow.open(tmp_path).latest().step == 2
    every([late], "leave")
    ray.kill(late)


@pytest.mark.long
def test_a_training_can_start_while_the_node_worker_ends(node: str, tmp_path: Path) -> None:
    """Its name is taken until it has ended."""
    (rank,) = start(str(tmp_path), 1, nodes=(NAME,))
    workers = set()
    for step in (1, 2, 3, 4):
        save_state([rank], step, layers, SIZE)
        workers.add(worker(node)._actor_id)
        every([rank], "leave")
        ray.get(worker(node).__ray_call__.remote(let_time_pass), timeout=60)
        if step == 1:
            worker(node).__ray_call__.remote(lambda actor: actor.node.end_if_unused())  # before it looks itself
        ray.get(rank.begin.remote(str(tmp_path), 0, 1, {}), timeout=120)
        assert restored(rank, step)
    assert len(workers) > 1
    every([rank], "leave")
    ray.kill(rank)
