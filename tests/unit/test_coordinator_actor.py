"""The coordinator's actor on an event loop of this process, without Ray."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from coordinated_run import part

from raystow.orchestrator.coordinator.actor import CoordinatorActor
from raystow.storage.clock import SYSTEM
from raystow.storage.committer import Committer
from raystow.storage.errors import OutcomeUnknown, SaveFailed
from raystow.storage.format.root import Entry
from raystow.workers.protocol.messages import Begin, PartFailed, RankFinished

PATIENCE = 30.0


@pytest.fixture
def uri(monkeypatch: pytest.MonkeyPatch) -> str:
    here = SimpleNamespace(get_node_id=lambda: "node-0", get_job_id=lambda: "1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "node-0", "Alive": True}])
    return f"memory://{SYSTEM.token()}"


async def save(actor: CoordinatorActor, step: int) -> Entry:
    ticket = await actor.begin(Begin(0, 1, "process", step, "node-0", step, 600.0, 0, 0))
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


def test_no_commit_waits_for_a_frozen_head_node(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits for its answer without end. Later answers are used."""
    woken, alive = threading.Event(), {"NodeID": "node-0", "Alive": True}
    asked = list[int]()

    def nodes() -> list[dict[str, Any]]:
        asked.append(1)
        woken.wait(PATIENCE)
        return [alive]

    async def run() -> tuple[Entry, Entry]:
        actor = CoordinatorActor(uri)
        try:
            first, second = await save(actor, 1), await save(actor, 2)
            assert len(asked) == 1
        finally:
            woken.set()
        doomed = await actor.begin(Begin(0, 1, "process", 3, "node-0", 3, 600.0, 0, 0))
        alive["Alive"] = False
        with pytest.raises(SaveFailed, match="node-0"):
            await asyncio.wait_for(actor._until(doomed, lambda attempt: attempt.phase.over), PATIENCE)
        return first, second

    monkeypatch.setattr(ray, "nodes", nodes)
    assert [entry.step for entry in asyncio.run(run())] == [1, 2]


def test_no_commit_waits_for_the_deletion_of_a_failed_save(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that deletes slowly would delay all commits."""
    deleting, may_end = threading.Event(), threading.Event()

    def discard(*_: Any) -> None:
        deleting.set()
        may_end.wait()

    async def run() -> Entry:
        actor = CoordinatorActor(uri)
        failed = await actor.begin(Begin(0, 1, "process", 1, "node-0", 1, 600.0, 0, 0))
        await actor.answer(PartFailed(failed, "out of memory"))
        assert await asyncio.to_thread(deleting.wait, PATIENCE)
        try:
            return await save(actor, 2)
        finally:
            may_end.set()

    monkeypatch.setattr(Committer, "discard", discard)
    assert asyncio.run(run()).step == 2
