"""Delta-encoded saves by real node workers and a real coordinator, without Ray."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from helpers.builders import overwrite_root
from helpers.local_cluster import LocalCluster
from helpers.processes import incarnation
from helpers.state_equality import restores

from integration.training_states import training
from raystow.orchestrator.restore.agreed import restore_agreed
from raystow.orchestrator.restore.agreement import ClusterAgreement
from raystow.orchestrator.restore.planner import plan_restore
from raystow.storage.errors import SaveFailed, StoreUnavailable
from raystow.storage.retention.policy import Policy
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import CoordinatorRequest, Message, RestoreChoice, RestoreVote

State = dict[str, Any]


def bases(cluster: LocalCluster) -> list[tuple[int, ...]]:
    return [entry.bases for entry in cluster.repository.root().versions]


@pytest.fixture
def uri() -> str:
    return f"memory://deltas-{SYSTEM.token()}"


def test_a_delta_group_has_the_configured_length(uri: str) -> None:
    with LocalCluster(uri, delta=3) as cluster:
        states = list(itertools.islice(training(), 6))
        for step, state in enumerate(states):
            cluster.save(state, step=step)
        assert bases(cluster) == [(), (1,), (1,), (1,), (), (5,)]
        versions = cluster.repository.versions()
        assert all(restores(version, state) for version, state in zip(versions, states, strict=True))
        assert versions[1].bytes < 0.85 * versions[0].bytes
        assert {c.coding.base for c in versions[1].chunks["optim.master"]} == {1}
        assert {c.coding.base for c in versions[1].chunks["model.w"]} == {1}, "it is stored with its master copy"
        assert {c.coding.base for c in versions[1].chunks["optim.step"]} == {None}
        for version in versions:
            cluster.repository.verify(version)


def test_versions_are_whole_by_default(uri: str) -> None:
    with LocalCluster(uri) as cluster:
        for step, state in enumerate(itertools.islice(training(), 3)):
            cluster.save(state, step=step)
        assert bases(cluster) == [(), (), ()]


def test_automatic_deltas_stop_when_they_do_not_pay(uri: str) -> None:
    with LocalCluster(uri, delta="auto") as cluster:
        for step, state in enumerate(itertools.islice(training(), 3)):
            cluster.save(state, step=step)
        for step in range(3, 6):  # random states: no delta is smaller than the whole version
            cluster.save({"w": torch.randn(300, 500)}, step=step)
        assert bases(cluster) == [(), (1,), (1,), (), (), ()]
        codings = [version.record.coding for version in cluster.repository.versions()]
        assert [list(coding) for coding in codings] == [[], *[["delta"]] * 5]
        assert codings[1]["delta"] == "to version 1 where that is smaller, number 1; none is stored yet"
        cluster.save({"w": torch.randn(300, 500)}, step=6)
        assert cluster.repository.latest().record.coding == {
            "whole": "deltas did not pay: tried again after 1 more whole version"
        }


def test_retention_keeps_bases_and_later_saves_work(uri: str) -> None:
    with LocalCluster(uri, delta=2) as cluster:
        for step, state in enumerate(itertools.islice(training(), 6)):
            version = cluster.save(state, step=step)
            repository = cluster.repository
            repository.plan_retention(Policy(keep_last=1), bases=cluster.coordinator.bases).execute()
            repository.plan_collection(grace=0).execute()
            assert restores(repository.latest(), state)
        assert [entry.id for entry in repository.root().versions] == [4, version.id]
        assert bases(cluster) == [(), (4,)]


def test_a_version_whose_base_left_memory_is_stored_whole(uri: str) -> None:
    states = training()
    with LocalCluster(uri, delta=9) as cluster:
        cluster.save(next(states), step=0)
        cluster.restart_node(0)
        cluster.save(next(states), step=1)
        cluster.save(state := next(states), step=2)
        assert bases(cluster) == [(), (), (2,)], "later versions are deltas to the whole version"
        assert restores(cluster.repository.latest(), state)


def test_memory_keeps_the_newest_version_and_not_its_base(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    states = list(itertools.islice(training(), 5))
    with LocalCluster(uri, delta=9) as cluster:
        tier = cluster.tier(0)
        for step, state in enumerate(states):
            cluster.save(state, step=step)
            newest = tier.holdings(cluster.repository.id)[-1]
            assert newest.whole == {0}, f"version {step + 1} can be restored from memory"
            if step == 1:
                tier.resize(int(1.2 * tier.used))
        assert [found for found in bases(cluster) if found] == [(1,), (1,), (4,)], "the base of version 4 was not in memory"
        assert "nothing is stored as a delta to version 1 from now on" in caplog.text
        assert all(restores(version, state) for version, state in zip(cluster.repository.versions(), states, strict=True))


def test_a_corrupted_base_in_memory_is_not_used(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    states = training()
    with LocalCluster(uri, delta=9) as cluster:
        cluster.save(next(states), step=0)
        (held,) = cluster.tier(0).holdings(cluster.repository.id)
        key = next(key for key in held.parts[0].objects if "optimizer-" in key)
        descriptor = cluster.tier(0).lend(cluster.repository.id, key).descriptor
        os.pwrite(descriptor, bytes(1000), 500)
        os.close(descriptor)
        cluster.save(state := next(states), step=1)
        newest = cluster.repository.latest()
        assert restores(newest, state)
        assert any(chunk.coding.base is None for chunk in newest.chunks["optim.exp_avg_sq"] + newest.chunks["optim.exp_avg"])
        assert "cannot be decoded" in caplog.text


def test_a_tensor_with_another_shape_is_stored_whole(uri: str) -> None:
    with LocalCluster(uri, delta=9, nodes=2) as cluster:
        first = [{"w": torch.arange(20_000) + i, "x": torch.arange(9000.0)} for i in range(3)]
        cluster.save(first[0], step=0)
        cluster.save({**first[1], "x": torch.arange(9000.0).reshape(90, 100)}, step=1)
        newest = cluster.repository.latest()
        assert {name: {c.coding.base for c in rows} for name, rows in newest.chunks.items()} == {"w": {1}, "x": {None}}
        cluster.save_all([first[2], first[2]], step=2)
        newest = cluster.repository.latest()
        assert torch.equal(newest.read("w"), first[2]["w"])
        cluster.repository.verify(newest)


def test_memory_restores_a_delta_while_the_store_is_down(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Port(CoordinatorClient):
        """A port that selects the newest version, with the locations that the coordinator knows."""

        def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
            return RestoreChoice.of(newest.entry, known, near, cluster.committer.record)

        def send(self, request: CoordinatorRequest[Any]) -> None: ...

    def down(*_: object, **__: object) -> None:
        raise StoreUnavailable("503", subject="the store")

    with LocalCluster(uri, delta=9) as cluster:
        for step, state in enumerate(itertools.islice(training(), 3)):
            newest = cluster.save(state, step=step)
        known = cluster.repository.root().versions
        held = cluster.tier(0).holdings(cluster.repository.id)
        assert [(holding.attempt.id, holding.whole) for holding in held] == [(1, {0}), (3, {0})]
        near = {holding.attempt.token: {0: ["node-0"]} for holding in held}
        for operation in ("get", "get_tagged", "get_range", "get_range_into", "list"):
            monkeypatch.setattr(MemoryStore, operation, down)
        agreement = ClusterAgreement(
            cluster.repository,
            Port(),
            RestoreVote(0, 1, incarnation("me"), 1, 60.0),
            itertools.count(2),
            lambda: cluster.address(0),
            here="node-0",
        )
        into = {group: {name: torch.zeros_like(tensor) for name, tensor in of.items()} for group, of in state.items()}
        assert restore_agreed(cluster.repository, into, agreement) == newest
        assert all(torch.equal(into[group][name], tensor) for group, of in state.items() for name, tensor in of.items())
        plan = plan_restore(agreement.version(newest.entry), into, sources=agreement.sources)
        assert {(part.base, part.source) for part in plan.reads} == {(0, "memory"), (1, "memory")}
        agreement.give_up("enough")


def test_a_base_removed_by_hand_fails_one_save(uri: str) -> None:
    """Only an operator can remove a base, and only while no version depends on it."""
    states = training()
    with LocalCluster(uri, delta=9) as cluster:
        cluster.save(next(states), step=0)
        root = cluster.repository.register
        gone = root.read().versions[0]
        overwrite_root(cluster.repository, lambda root: type(root)(**{**vars(root), "versions": ()}) if root.versions else root)
        with pytest.raises(SaveFailed, match=f"version {gone.id}"):
            cluster.save(next(states), step=1)
        cluster.save(state := next(states), step=2)
        assert bases(cluster) == [()]
        assert restores(cluster.repository.latest(), state)
