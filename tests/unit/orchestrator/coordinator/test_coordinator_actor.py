"""The coordinator's actor on an event loop of this process, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.begins import begin_of
from helpers.coordinated_run import part
from helpers.fake_clock import FakeClock
from helpers.fake_ray import FakeRay
from helpers.no_ray import connect_without_ray
from helpers.processes import incarnation
from helpers.s3_server import make_bucket, s3_server
from helpers.scripted_store import ScriptedStore, script, unscript

from raystow.orchestrator.coordinator import actor as actor_module
from raystow.orchestrator.coordinator import segments
from raystow.orchestrator.coordinator.actor import CoordinatorActor
from raystow.storage.checks.repair import plan_repair
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import NotARepository, OutcomeUnknown, SaveFailed, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.format.root import Entry
from raystow.storage.object_store import ObjectStore
from raystow.storage.repository import open_repository
from raystow.storage.retention.policy import Policy
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store
from raystow.workers.protocol.messages import (
    START,
    Begin,
    EntryInfo,
    FindOutcome,
    Generation,
    OpenSegment,
    PartFailed,
    PartStaged,
    PartStored,
    RankFinished,
    SegmentStored,
    SegmentTicket,
    StartRun,
    Ticket,
)

PATIENCE = 30.0


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay().replace(monkeypatch, "get_runtime_context", "nodes", "kill")


@pytest.fixture
def uri(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> str:
    connect_without_ray(monkeypatch, fake_ray.node)
    return ScriptedStore.named(SYSTEM.token()).uri


async def save(actor: CoordinatorActor, step: int, **fields: Any) -> Entry:
    ticket = await actor.answer(await begin(actor, step, **fields))
    await actor.answer(RankFinished(ticket, 0, 0))
    return (await asyncio.wait_for(actor.answer(PartStored(ticket, part(0))), PATIENCE)).entry


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

    def __init__(self, fake_ray: FakeRay) -> None:
        self.alive, self.asked, self.wake = {"node-0"}, threading.Semaphore(0), threading.Event()
        fake_ray.nodes = self._nodes  # type: ignore[method-assign]

    def _nodes(self) -> list[dict[str, Any]]:
        alive = [{"NodeID": node, "Alive": True} for node in self.alive]
        self.asked.release()
        self.wake.wait(PATIENCE)
        return alive


async def begin(actor: CoordinatorActor, step: int, node: str = "node-0", timeout: float = 600.0, **fields: Any) -> Begin:
    process = incarnation("process", (await actor.start()).repository)
    return begin_of(0, 1, process, step, node, step, timeout, 0, 0, **fields)


async def lost(actor: CoordinatorActor, ticket: Ticket) -> str:
    """Wait until an attempt is aborted; return the reason."""
    with pytest.raises(SaveFailed) as failure:
        await asyncio.wait_for(actor.answer(FindOutcome(ticket.id, ticket.attempt)), PATIENCE / 3)
    return str(failure.value)


def test_no_save_waits_for_a_frozen_head_node(uri: str, fake_ray: FakeRay) -> None:
    """Ray waits for its answer without end. Saves become versions meanwhile, or fail at their deadline."""
    head = FrozenHead(fake_ray)

    async def run() -> list[int]:
        actor = CoordinatorActor(uri)
        try:
            steps = [(await asyncio.wait_for(save(actor, step), PATIENCE / 3)).step for step in (1, 2)]
            assert "had not delivered" in await lost(actor, await actor.answer(await begin(actor, 3, timeout=0.1)))
        finally:
            head.wake.set()
        return steps

    assert asyncio.run(run()) == [1, 2]
    assert head.asked._value == 1


def test_a_late_answer_aborts_no_save_of_a_new_node(uri: str, fake_ray: FakeRay) -> None:
    head = FrozenHead(fake_ray)

    async def asked() -> None:
        assert await asyncio.to_thread(head.asked.acquire, timeout=PATIENCE)

    async def run() -> None:
        actor = CoordinatorActor(uri)
        try:
            await save(actor, 1)
            await asked()
            new = await actor.answer(await begin(actor, 2, "node-1"))
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
        failed = await actor.answer(await begin(actor, 1))
        await actor.answer(PartFailed(failed, "out of memory"))
        assert await asyncio.to_thread(deleting.wait, PATIENCE)
        try:
            return await save(actor, 2)
        finally:
            may_end.set()

    monkeypatch.setattr(Committer, "discard", discard)
    assert asyncio.run(run()).step == 2


def test_the_policy_of_the_last_version_is_applied(uri: str) -> None:
    """Also if that of the version before is still being applied."""
    store, applying, may_end = open_store(uri), threading.Event(), threading.Event()
    listed = store.list

    def slow(prefix: str, *args: Any) -> Iterator[Any]:
        if prefix.startswith("leases"):
            applying.set()
            may_end.wait(PATIENCE)
        return listed(prefix, *args)

    async def run() -> None:
        actor, policy = CoordinatorActor(uri), Policy(keep_last=1)
        script(store, list=slow)
        for step in (1, 2):
            await save(actor, step, retention=policy)
        assert await asyncio.to_thread(applying.wait, PATIENCE)
        await save(actor, 3, retention=policy)
        may_end.set()
        await until(lambda: [version.step for version in open_repository(uri).versions()] == [3])

    asyncio.run(run())


@pytest.fixture(params=["memory", "file", "s3"])
def stores(request: pytest.FixtureRequest, uri: str, tmp_path: Path) -> Iterator[ObjectStore]:
    """A store of each kind."""
    if request.param == "s3":
        with s3_server():
            yield open_store(f"s3://{make_bucket('raystow-tests')}/{SYSTEM.token()}")
    else:
        yield open_store(uri if request.param == "memory" else tmp_path.as_uri())


@pytest.mark.parametrize("under_way", [False, True])
def test_a_training_begins_anew_where_all_was_deleted(stores: ObjectStore, under_way: bool) -> None:
    """Also while the old training saves, whose uploads come back into the new repository and count for nothing there."""

    async def run() -> None:
        actor = CoordinatorActor(stores.uri)
        old = await actor.answer(StartRun("1"))
        await save(actor, 1)
        waiting = None
        if under_way:
            ticket = await actor.answer(await begin(actor, 2))
            stores.put(keys.pack(ticket.id, ticket.attempt, 0, "weights", 0), [b"uploaded"])
            waiting = asyncio.create_task(actor.answer(FindOutcome(ticket.id, ticket.attempt)))
        stores.delete([info.key for info in list(stores.list("")) if under_way is False or "weights" not in info.key])
        if not under_way:
            with pytest.raises(SaveFailed, match=rf"{stores.uri}: .* of repository {old.repository} do not exist any more"):
                await save(actor, 2)
            await until(lambda: not list(stores.list(keys.VERSIONS)))
        new, again = await asyncio.gather(actor.answer(StartRun("2")), actor.answer(StartRun("2")))
        if waiting is not None:
            with pytest.raises(SaveFailed, match="do not exist any more"):
                await asyncio.wait_for(waiting, PATIENCE)
        assert old.repository != new.repository == again.repository
        assert open_repository(stores.uri).versions() == []
        process = incarnation("process 7 on host", old.repository)
        with pytest.raises(NotARepository, match=f"process 7 on host, job 1 began with repository {old.repository}"):
            await actor.answer(begin_of(0, 1, process, 3, "node-0", 3))
        assert (await save(actor, 4)).id == 1
        assert [version.step for version in open_repository(stores.uri).versions()] == [4]

    asyncio.run(run())


def repair(uri: str) -> None:
    """Lose the root, and make it anew."""
    store = open_store(uri)
    store.delete([keys.ROOT])
    plan_repair(store).execute()


def test_a_training_that_starts_after_a_repair_saves_at_once(uri: str) -> None:
    """Also while an earlier one has a save under way, which fails."""

    async def run() -> None:
        actor = CoordinatorActor(uri)
        await actor.answer(StartRun("1"))
        await save(actor, 1)
        ticket = await actor.answer(await begin(actor, 2))
        repair(uri)
        await actor.answer(StartRun("1"))
        assert "repair" in await lost(actor, ticket)
        assert (await save(actor, 3)).step == 3

    asyncio.run(run())


def test_steps_become_durable_after_a_repair(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a save in between, which may be hours away."""
    monkeypatch.setattr(segments, "verify_segment", lambda *_, **__: None)  # no node has written its entries

    async def run() -> None:
        actor = CoordinatorActor(uri)
        repository = (await actor.answer(StartRun("1"))).repository
        repair(uri)
        for step in (2, 3):
            entry = EntryInfo(repository, 0, 1, step, START, (Generation("0" * 16, 1),), 8, bytes(32))
            ticket = await actor.answer(OpenSegment(entry))
            assert isinstance(ticket, SegmentTicket)
            await actor.answer(SegmentStored(ticket.number, ticket.attempt, 0, (entry,)))
            await until(lambda: actor._opened is not None and not actor._opened.segments.in_use)
        assert [segment.step for segment in open_repository(uri).root().segments] == [3]

    asyncio.run(run())


def test_a_store_that_is_down_is_no_deleted_repository(uri: str) -> None:
    def down(*_: object, **__: object) -> None:
        raise StoreUnavailable("503", subject="root.json")

    async def run() -> None:
        actor = CoordinatorActor(uri)
        before = await actor.answer(StartRun("1"))
        script(open_store(uri), get_tagged=down)
        assert (await actor.answer(StartRun("2"))).repository == before.repository
        unscript(open_store(uri))
        assert (await save(actor, 1)).id == 1

    asyncio.run(run())


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(round(PATIENCE / 0.05)):
        if reached():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not reached")


class Cluster:
    """Time, the ranks that are connected to node workers, and whether the coordinator has ended itself."""

    def __init__(self, fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.connected, self.ended = FakeClock(), True, asyncio.Event()
        fake_ray.kill = lambda actor: self.ended.set()  # type: ignore[method-assign]
        monkeypatch.setattr(actor_module, "SYSTEM", self.clock)
        monkeypatch.setattr(actor_module, "ranks_connected", self._ranks_connected)
        self.questions = 0

    async def _ranks_connected(self, uri: str) -> bool:
        self.questions += 1
        return self.connected


def test_a_coordinator_ends_soon_after_its_last_training(uri: str, fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are connected keep it for days, and so does a save that only memory has."""

    async def run() -> None:
        cluster = Cluster(fake_ray, monkeypatch)
        actor = CoordinatorActor(uri)
        await save(actor, 1)
        for _ in range(3):  # a training that does not save for long
            asked = cluster.questions
            cluster.clock.time += 86400
            await until(lambda asked=asked: cluster.questions > asked)
        assert not cluster.ended.is_set()
        cluster.connected = False
        ticket = await actor.answer(await begin(actor, 2))
        await actor.answer(RankFinished(ticket, 0, 0))
        await actor.answer(PartStaged(ticket, part(0)))
        await actor.answer(PartFailed(ticket, "the store is down"))
        asked = cluster.questions
        cluster.clock.time += 86400
        await save(actor, 3)  # is newer than the save in memory
        assert (cluster.questions, cluster.ended.is_set()) == (asked, False)
        await until(lambda: actor._sweep is not None and not actor._is_in_use())  # the objects of the failed save are deleted
        cluster.clock.time += 59
        await asyncio.wait_for(cluster.ended.wait(), PATIENCE)

    asyncio.run(run())
