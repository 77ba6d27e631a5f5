"""A training process that is killed once ``Pending.staged`` is true loses no save."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster, first_save
from helpers.polling import wait_until
from helpers.state_equality import same
from msgspec.structs import replace

import raystow
from raystow.orchestrator.coordinator.attempt import Phase
from raystow.state.planner import plan_save
from raystow.storage.coding.chunk import RAW
from raystow.workers.protocol.messages import OpenSession
from raystow.workers.staging.client import Staging
from raystow.workers.staging.plan import SaveOrder
from raystow.workers.staging.progress import SaveProgress

STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": lambda: {"w": torch.arange(3 << 20), "small": torch.ones(3), "step": 7},  # 24 MiB
    "raw tensors": lambda: {"w": torch.arange(6 << 20, dtype=torch.float32), "small": torch.ones(3), "step": 7},
    "plain values": lambda: {"step": 7, "name": "a", "rate": 2.5},
    "nothing": dict,
}
ENDS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os._exit": lambda: os._exit(0),
}


def train(address: str, opening: OpenSession, state: str, end: str) -> None:
    """Save as a training process, and die once the save is staged."""
    staging = Staging(address, replace(opening, pid=os.getpid()), raw=True)
    plan = plan_save(STATES[state](), rank=opening.rank, world_size=opening.world_size)

    class Dying(SaveProgress):
        def note_staged(self) -> None:
            ENDS[end]()

    staging.submit(SaveOrder(first_save(opening, step=1), plan, Dying(1), lambda outcome: None))
    signal.pause()


@pytest.fixture(scope="module")
def processes() -> Any:
    """Start processes that have imported torch, without any threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "ray", "raystow.workers.node.node", "raystow.state.planner", "torch"])
    return context


@pytest.fixture
def node(coding_is_slow: None) -> Iterator[LocalCluster]:
    with LocalCluster("memory://killed", threads=1) as cluster:
        cluster.save({"w": torch.ones(1 << 20)}, step=0)  # the rate of the store is known afterwards
        yield cluster


def save_and_die(processes: Any, node: LocalCluster, state: str, end: str, ranks: int) -> None:
    """Each rank dies as soon as its part is staged, whether or not the others have begun."""
    before, dying = {version.id for version in node.repository.versions()}, []
    for rank in range(ranks):
        dying.append(processes.Process(target=train, args=(node.address(0), node.opening(rank, ranks), state, end)))
        dying[-1].start()
    for one in dying:
        one.join(60)
        assert one.exitcode is not None
    wait_until(lambda: all(a.phase.over for a in node.coordinator.attempts), "the save ends")
    assert [a.reason for a in node.coordinator.attempts if a.phase is Phase.ABORTED] == []
    (version,) = [version for version in node.repository.versions() if version.id not in before]
    into = {key: torch.zeros_like(value) if torch.is_tensor(value) else None for key, value in STATES[state]().items()}
    raystow.restore_latest(node.uri, into=into)
    assert same(into, STATES[state]())
    if state == "raw tensors":
        assert RAW in version.record.coding
    assert version.world_size == ranks


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("state", STATES)
def test_a_staged_save_survives_its_ranks(processes: Any, node: LocalCluster, state: str, end: str) -> None:
    save_and_die(processes, node, state, end, 2)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_two_hundred_staged_saves_survive_their_ranks(processes: Any, node: LocalCluster, end: str) -> None:
    for trial in range(200):
        save_and_die(processes, node, [*STATES][trial % len(STATES)], end, 1 + trial % 3)
