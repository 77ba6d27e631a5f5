"""A coordinator that no run uses ends, and the next run starts another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from builders import layers
from polling import wait_until
from ranks import every, save_state, start, take

from raystow.orchestrator.coordinator.ray_client import coordinator_actor, coordinator_name
from raystow.workers.node.actor import NAMESPACE
from raystow.workers.protocol.messages import CoordinatorStatus

pytestmark = pytest.mark.usefixtures("cluster")

SIZE = 10_000
UNUSED = 1.0


def status(uri: str) -> CoordinatorStatus | None:
    """Return the status of the coordinator; None if it has ended."""
    try:
        found: CoordinatorStatus = ray.get(ray.get_actor(coordinator_name(uri), NAMESPACE).overview.remote(), timeout=60)
    except (ValueError, ray.exceptions.ActorDiedError):
        return None
    return found


def age(uri: str) -> float:
    known = status(uri)
    assert known is not None, "the coordinator has ended while a rank is connected"
    assert known.age is not None
    return known.age


def test_a_coordinator_ends_after_its_last_run(tmp_path: Path) -> None:
    """Processes and node workers that knew it find the next one, and the newest version is restored from memory."""
    uri = tmp_path.as_uri()
    (rank,) = start(str(tmp_path), 1)
    save_state([rank], 1, layers, SIZE)
    ray.kill(coordinator_actor(uri))
    coordinator_actor(uri, unused=UNUSED)
    save_state([rank], 2, layers, SIZE)
    wait_until(lambda: age(uri) > 3 * UNUSED, "a rank that does not save for long")
    late = take("node_a")
    ray.get(late.begin.remote(str(tmp_path), 0, 1, {}), timeout=60)
    every([rank], "leave")
    wait_until(lambda: status(uri) is None, "the end of the coordinator")
    for pack in tmp_path.glob("versions/*/*.pack"):
        pack.unlink()
    every([late], "set", layers, -1, SIZE)
    assert every([late], "restore")[0].step == 2
    save_state([late], 3, layers, SIZE)
    assert status(uri) is not None
