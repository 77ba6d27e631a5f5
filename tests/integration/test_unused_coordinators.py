"""A coordinator that no run uses ends, and the next run starts another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch
from helpers.builders import layers
from helpers.polling import wait_until
from helpers.processes import incarnation

import raystow
from integration.ranks import Rank, every, save_state, start, take
from raystow.orchestrator.coordinator.ray_client import RayCoordinatorClient, coordinator_actor, coordinator_name
from raystow.workers.node.actor import NAMESPACE
from raystow.workers.protocol.messages import CoordinatorStatus, JoinRun, StartRun

pytestmark = pytest.mark.usefixtures("cluster")

SIZE = 10_000
UNUSED = 1.0


def has_ended(uri: str) -> bool:
    try:
        ray.get_actor(coordinator_name(uri), NAMESPACE)
    except ValueError:
        return True
    return False


def age_of_newest(uri: str) -> float:
    """Return the seconds since the newest version was made; raise if the coordinator has ended."""
    status: CoordinatorStatus = ray.get(ray.get_actor(coordinator_name(uri), NAMESPACE).overview.remote(), timeout=60)
    assert status.age is not None
    return status.age


@pytest.mark.long
def test_a_coordinator_ends_after_its_last_run(tmp_path: Path) -> None:
    """Processes and node workers that knew it find the next one, and the newest version is restored from memory."""
    uri = tmp_path.as_uri()
    (rank,) = start(str(tmp_path), 1)
    save_state([rank], 1, layers, SIZE)
    ray.kill(coordinator_actor(uri))
    coordinator_actor(uri, unused=UNUSED)
    save_state([rank], 2, layers, SIZE)
    wait_until(lambda: age_of_newest(uri) > 3 * UNUSED, "a rank that does not save for long")
    late = take("node_a")
    ray.get(late.begin.remote(str(tmp_path), 0, 1, {}), timeout=60)
    every([rank], "leave")
    wait_until(lambda: has_ended(uri), "the end of the coordinator")
    for pack in tmp_path.glob("versions/*/*.pack"):
        pack.unlink()
    every([late], "set", layers, -1, SIZE)
    assert every([late], "restore")[0].step == 2
    (restored,) = every([late], "do", _state)
    assert all(torch.equal(restored[name], tensor) for name, tensor in layers(2, SIZE).items())
    save_state([late], 3, layers, SIZE)
    assert not has_ended(uri)


def _state(rank: Rank) -> dict[str, torch.Tensor]:
    return rank.state


def test_a_coordinator_that_cannot_start_ends(tmp_path: Path) -> None:
    """A typing error in an address leaves no process."""
    (tmp_path / "file").touch()
    uri = (tmp_path / "file" / "run").as_uri()
    coordinator_actor(uri, unused=UNUSED)
    with pytest.raises(raystow.StoreError):
        RayCoordinatorClient(uri).ask(StartRun("1"), timeout=60)
    wait_until(lambda: has_ended(uri), "the end of the coordinator")


@pytest.mark.long
def test_a_training_can_start_while_the_coordinator_ends(tmp_path: Path) -> None:
    """Processes that know it, and new ones, which may find the dying one, get another one."""
    uri = tmp_path.as_uri()
    known = RayCoordinatorClient(uri)
    repository = known.ask(StartRun("1"), timeout=60).repository
    for n in range(2):
        ray.kill(ray.get_actor(coordinator_name(uri), NAMESPACE))
        RayCoordinatorClient(uri).ask(StartRun("1"), timeout=60)
        ray.kill(ray.get_actor(coordinator_name(uri), NAMESPACE))
        known.ask(JoinRun(0, incarnation(f"process {n}", repository, number=n), 1))
