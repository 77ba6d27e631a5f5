"""The step journal on a cluster: entries survive failures of processes and nodes, and all ranks continue at the same step."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.journal_port import snapshot
from helpers.polling import wait_until
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook

import raystow
from integration.cli_runner import run, run_json
from integration.ranks import Rank, every, start
from raystow.orchestrator.coordinator.ray_client import coordinator_actor, coordinator_name
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store
from raystow.workers.node.actor import NAMESPACE

pytestmark = pytest.mark.usefixtures("two_nodes")


@pytest.fixture
def two_nodes(cluster: object) -> None:
    """End a node worker that another test may have left on the head: it would receive copies."""
    for node in ray.nodes():
        if node["Alive"] and not node["Resources"].get("CPU"):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(f"node-{node['NodeID']}", NAMESPACE))


def build(self: Any) -> None:
    """Build a model and its optimizer, equal on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    self.model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 8))
    self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
    self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)


def step(self: Any, number: int) -> None:
    self.optimizer.zero_grad()
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
    self.model(x).square().mean().backward()
    self.optimizer.step()
    self.scheduler.step()


def resume(self: Rank, durable_every: int = 0) -> tuple[int, int]:
    """Build, restore and replay; return the step of the version and the last replayed step."""
    build(self)
    weights, moments = get_state_dict(self.model, self.optimizer)
    state = {"model": weights, "optim": moments, "scheduler": self.scheduler.state_dict(), "step": 0}
    self.journal = self.checkpointer.journal(self.model, self.optimizer, durable_every=durable_every)
    self.checkpointer.guard(self.optimizer)
    version = self.checkpointer.restore_latest(into=state)
    if version is not None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["scheduler"])
    replayed: Any = self.journal.replay()
    if replayed is not None:
        self.scheduler.load_state_dict(replayed["scheduler"])
        state["step"] = replayed["step"]
    self.reached = state["step"]
    return -1 if version is None else version.step, self.reached


def resume_slowly(self: Rank, seconds: float, begun: Path) -> tuple[int, int]:
    """``resume``, with steps of an optimizer that take so long. The file ``begun`` is there after the first replayed one."""
    calls = itertools.count()

    def wait(*_: object) -> None:
        if next(calls):  # the first one is of ``get_state_dict``
            begun.touch()
        SYSTEM.sleep(seconds)

    hook = register_optimizer_step_post_hook(wait)
    try:
        return resume(self)
    finally:
        hook.remove()


def train(self: Rank, last: int, save_at: int = 0) -> None:
    for number in range(self.reached + 1, last + 1):
        step(self, number)
        self.journal.record(number, values={"step": number, "scheduler": self.scheduler.state_dict()})
        if number == save_at:
            weights, moments = get_state_dict(self.model, self.optimizer)
            state = {"model": weights, "optim": moments, "scheduler": self.scheduler.state_dict(), "step": number}
            self.pending.append(self.checkpointer.save(state, step=number))
    assert self.journal.flush()  # the last entry and its copies are in memory
    self.reached = last


def bits(self: Rank) -> list[bytes]:
    return snapshot(self.model, self.optimizer)


def advised(self: Rank) -> bool:
    return self.journal.save_advised


def undisturbed(last: int) -> list[bytes]:
    class Alone:
        pass

    here: Any = Alone()
    build(here)
    get_state_dict(here.model, here.optimizer)
    for number in range(1, last + 1):
        step(here, number)
    return snapshot(here.model, here.optimizer)


def entries(node: str) -> list[tuple[int, int]]:
    """Return rank and step of the entries in a node's memory."""
    worker = ray.get_actor(f"node-{node}", NAMESPACE)
    held = ray.get(worker.journal_entries.remote(REPOSITORY[0]), timeout=30)
    return sorted((info.rank, info.step) for info in held)


REPOSITORY = [""]


def kill_node_worker(self: Rank) -> None:
    for pid in self.node_worker_pids():
        os.kill(pid, signal.SIGKILL)


def test_steps_after_a_version_are_replayed(tmp_path: Path) -> None:
    """All processes and a node worker die, and the ranks restart on other nodes; entries of dead processes are copied again."""
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    ranks = start(str(tmp_path), 2)
    assert every(ranks, "do", resume) == [(-1, 0)] * 2
    every(ranks, "do", train, 4, 2)
    every(ranks, "result")
    every(ranks, "do", train, 6)
    REPOSITORY[0] = raystow.open(tmp_path).id
    reach = run_json("plan", tmp_path)["journal"]
    assert (reach["step"], reach["entries"], reach["end"]) == (6, 8, "")
    assert reach["nodes"].keys() <= {*alive}
    assert "reaches step 6 by 8 journal entries" in run("plan", tmp_path).stdout
    assert run_json("plan", tmp_path, 1)["journal"] is None
    needed = {(rank, number) for rank in (0, 1) for number in (3, 4, 5, 6)}

    def wait_for_copies() -> None:
        """Older entries may also be present: a node drops copies when the next entry arrives."""
        wait_until(lambda: all(set(entries(node)) >= needed for node in alive), lambda: str([entries(node) for node in alive]))

    wait_for_copies()
    ray.get(ranks[0].do.remote(kill_node_worker), timeout=30)
    for rank in ranks:
        ray.kill(rank)

    ranks = start(str(tmp_path), 2, nodes=("node_b", "node_a"))
    assert every(ranks, "do", resume) == [(2, 6)] * 2
    wait_for_copies()
    every(ranks, "do", train, 8)
    assert every(ranks, "do", bits) == [undisturbed(8)] * 2


@pytest.mark.slow
def test_a_replay_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    """On one rank; the other one waits as long as it replays on."""
    ranks = start(str(tmp_path), 2)
    every(ranks, "do", resume)
    every(ranks, "do", train, 6)
    for rank in ranks:
        ray.kill(rank)

    ranks = start(str(tmp_path), 2, timeout=6.0)
    reached = [ranks[0].do.remote(resume), ranks[1].do.remote(resume_slowly, 1.5, tmp_path / "replaying")]
    assert ray.get(reached, timeout=120) == [(-1, 6)] * 2
    assert every(ranks, "do", bits) == [undisturbed(6)] * 2


@pytest.mark.long
def test_a_replay_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    """While one rank replays, and the other waits for it."""
    ranks = start(str(tmp_path), 2)
    every(ranks, "do", resume)
    every(ranks, "do", train, 4)
    for rank in ranks:
        ray.kill(rank)

    ranks = start(str(tmp_path), 2)
    reached = [ranks[0].do.remote(resume), ranks[1].do.remote(resume_slowly, 1.5, tmp_path / "replaying")]
    wait_until((tmp_path / "replaying").exists, "a step has been replayed")
    coordinator = coordinator_actor(tmp_path.as_uri())
    os.kill(ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    assert ray.get(reached, timeout=120) == [(-1, 4)] * 2
    assert every(ranks, "do", bits) == [undisturbed(4)] * 2


def test_training_continues_without_journal_memory(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1, memory=raystow.Memory(journal=0))
    assert every([rank], "do", resume) == [(-1, 0)]
    every([rank], "do", train, 3)
    assert every([rank], "do", advised) == [True]
    assert every([rank], "do", bits) == [undisturbed(3)]


@pytest.mark.long
def test_durable_steps_survive_the_loss_of_all_nodes(tmp_path: Path) -> None:
    """They are replayed from a version and later segments, with empty memory; new segments continue the old ones."""
    ranks = start(str(tmp_path), 2)
    assert every(ranks, "do", resume, 2) == [(-1, 0)] * 2
    every(ranks, "do", train, 5, 3)
    every(ranks, "result")
    every(ranks, "do", train, 9)
    wait_for_segments(tmp_path, 8)
    lose_all(ranks, str(tmp_path))

    ranks = start(str(tmp_path), 2, nodes=("node_b", "node_a"))
    assert every(ranks, "do", resume, 2) == [(3, 8)] * 2
    every(ranks, "do", train, 11)
    assert every(ranks, "do", bits) == [undisturbed(11)] * 2
    wait_for_segments(tmp_path, 10)


@pytest.mark.long
def test_steps_before_a_rollback_are_not_replayed(tmp_path: Path) -> None:
    """They are in memory and in the store, and follow the version that the rollback makes the newest again."""
    (rank,) = start(str(tmp_path), 1)
    assert every([rank], "do", resume, 2) == [(-1, 0)]
    every([rank], "do", train, 3, 2)
    every([rank], "result")
    every([rank], "do", train, 5)
    wait_for_segments(tmp_path, 4)
    ray.kill(rank)
    repository = raystow.open(tmp_path)
    assert repository.rollback(repository.version("step:2")) == []
    (rank,) = start(str(tmp_path), 1)
    assert every([rank], "do", resume, 2) == [(2, 2)]
    every([rank], "do", train, 4)
    ray.kill(rank)
    (rank,) = start(str(tmp_path), 1)
    assert every([rank], "do", resume, 2) == [(2, 4)]
    assert every([rank], "do", bits) == [undisturbed(4)]


def wait_for_segments(path: Path, step: int) -> None:
    repository = raystow.open(path)
    wait_until(lambda: [one.step for one in repository.root().segments][-1:] == [step], lambda: str(repository.root().segments))


def lose_all(ranks: list[Any], uri: str) -> None:
    """Kill the ranks, the workers of all nodes and the coordinator."""
    for rank in ranks:
        ray.get(rank.do.remote(kill_node_worker), timeout=30)
        ray.kill(rank)
    ray.kill(ray.get_actor(coordinator_name(open_store(uri).uri), NAMESPACE))
