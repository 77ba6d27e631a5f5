"""The coordinator's actor on an event loop of this process, without Ray."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from coordinated_run import part
from no_ray import without_ray

from raystow.orchestrator.coordinator.actor import CoordinatorActor
from raystow.storage.clock import SYSTEM
from raystow.storage.committer import Committer
from raystow.storage.errors import OutcomeUnknown, SaveFailed
from raystow.storage.format.root import Entry
from raystow.workers.protocol.messages import Begin, PartFailed, RankFinished, Ticket
from raystow.workers.ray_connection import RayConnection

PATIENCE = 30.0


@pytest.fixture
def uri(monkeypatch: pytest.MonkeyPatch) -> str:
    here = SimpleNamespace(get_node_id=lambda: "node-0", get_job_id=lambda: "1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(RayConnection, "here", without_ray("node-0"))
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "node-0", "Alive": True}])
    return f"memory://{SYSTEM.token()}"


async def save(actor: CoordinatorActor, step: int) -> Entry:
    ticket = await actor.begin(begin(step))
    await actor.answer(RankFinished(ticket, 0, 0))
    return await asyncio.wait_for(actor.fragment(ticket, part(0), ()), PATIENCE)


def test_an_unexpected_error_ends_the_save(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt would be committed again and again, and no later save, deadline or restore would be looked after."""

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory for the record")

    async def run() -> Entry:
        actor = CoordinatorActor(uri)
        with monkeypatch.context() as patch:
            patch.setattr(Committer, "commit", fail)
            with pytest.raises(OutcomeUnknown, match=r"save of step 1: .*no memory for the record"):
                await save(actor, 1)
        return await save(actor, 2)

    assert asyncio.run(run()).step == 2


class FrozenHead:
    """Answers with the nodes that were alive when it was asked, and only after ``wake``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive, self.asked, self.wake = {"node-0"}, threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(ray, "nodes", self._nodes)

    def _nodes(self) -> list[dict[str, Any]]:
        alive = [{"NodeID": node, "Alive": True} for node in self.alive]
        self.asked.release()
        self.wake.wait(PATIENCE)
        return alive


def begin(step: int, node: str = "node-0", timeout: float = 600.0) -> Begin:
    return Begin(0, 1, "process", step, node, step, timeout, 0, 0)


async def lost(actor: CoordinatorActor, ticket: Ticket) -> str:
    """Wait until an attempt is aborted; return the reason."""
    with pytest.raises(SaveFailed) as failure:
        await asyncio.wait_for(actor._until(ticket, lambda attempt: attempt.phase.over), PATIENCE / 3)
    return str(failure.value)


def test_no_save_waits_for_a_frozen_head_node(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits for its answer without end. Saves become versions meanwhile, or fail at their deadline."""
    head = FrozenHead(monkeypatch)

    async def run() -> list[int]:
        actor = CoordinatorActor(uri)
        try:
            steps = [(await asyncio.wait_for(save(actor, step), PATIENCE / 3)).step for step in (1, 2)]
            assert "had not delivered" in await lost(actor, await actor.begin(begin(3, timeout=0.1)))
        finally:
            head.wake.set()
        return steps

    assert asyncio.run(run()) == [1, 2]
    assert head.asked._value == 1


def test_a_late_answer_aborts_no_save_of_a_new_node(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = FrozenHead(monkeypatch)

    async def asked() -> None:
        assert await asyncio.to_thread(head.asked.acquire, timeout=PATIENCE)

    async def run() -> None:
        actor = CoordinatorActor(uri)
        try:
            await save(actor, 1)
            await asked()
            new = await actor.begin(begin(2, "node-1"))
            head.alive = {"node-0", "node-1"}
        finally:
            head.wake.set()
        for _ in range(2):  # until the first answer and the next one have been taken
            await asked()
        assert actor._opened is not None
        assert not actor._opened.core.attempt(new).phase.over
        head.alive = {"node-0"}
        assert "node node-1 died" in await lost(actor, new)

    asyncio.run(run())


def test_no_commit_waits_for_the_deletion_of_a_failed_save(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that deletes slowly would delay all commits."""
    deleting, may_end = threading.Event(), threading.Event()

    def discard(*_: Any) -> None:
        deleting.set()
        may_end.wait()

    async def run() -> Entry:
        actor = CoordinatorActor(uri)
        failed = await actor.begin(begin(1))
        await actor.answer(PartFailed(failed, "out of memory"))
        assert await asyncio.to_thread(deleting.wait, PATIENCE)
        try:
            return await save(actor, 2)
        finally:
            may_end.set()

    monkeypatch.setattr(Committer, "discard", discard)
    assert asyncio.run(run()).step == 2
