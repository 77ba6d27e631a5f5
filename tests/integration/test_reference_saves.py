"""Saves that reference an earlier version for unchanged data, by real node workers and a real coordinator, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.colliding_tensors import colliding_tensors
from helpers.local_cluster import LocalCluster
from helpers.state_equality import restores

from raystow.orchestrator.coordinator.delta_schedule import DEEPEST
from raystow.storage.checks.repair import plan_repair
from raystow.storage.retention.policy import Policy
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.versions.version import Version

State = dict[str, Any]

torch.manual_seed(1)
FROZEN = {f"layer{i}": torch.randn(300, 400) for i in range(4)}
FROZEN["nan"] = torch.randint(-(1 << 31), 1 << 31, (20_000,)).to(torch.int32).view(torch.float32)
FROZEN["half"] = FROZEN["layer0"].bfloat16()


def lora(step: int) -> State:
    """Return a state with a large frozen model and a small adapter that changes in each step."""
    generator = torch.Generator().manual_seed(step)
    adapter = torch.randn(3_000, generator=generator)
    return {"model": dict(FROZEN), "adapter": adapter, "empty": torch.zeros(0, 7), "step": torch.tensor(float(step))}


def references(version: Version) -> dict[str, int | None]:
    return {name: rows[0].coding.base for name, rows in version.chunks.items() if rows[0].is_reference}


@pytest.fixture
def uri() -> str:
    return f"memory://references-{SYSTEM.token()}"


def test_frozen_tensors_are_stored_once_over_many_saves(uri: str) -> None:
    with LocalCluster(uri, delta="auto") as cluster:
        versions = [cluster.save(lora(step), step=step) for step in range(20)]
        whole = versions[0].bytes
        assert all(version.bytes < 0.03 * whole for version in versions[1:])
        assert {version.entry.bases for version in versions[1:]} == {(1,)}
        assert set(references(versions[-1])) == {f"model.{name}" for name in FROZEN}
        assert {*versions[-1].tensors()} == {*versions[0].tensors()}
        assert "whole" in versions[17].record.coding, "the series of deltas ended, but frozen tensors were not stored again"
        for step in (0, 1, 17, 19):
            assert restores(versions[step], lora(step))
            cluster.repository.verify(versions[step])


def test_references_survive_retention_compaction_and_repair(uri: str) -> None:
    with LocalCluster(uri, delta="auto") as cluster:
        repository = cluster.repository
        for step in range(4):
            cluster.save(lora(step), step=step)
        repository.plan_retention(Policy(keep_last=2), bases=cluster.coordinator.bases).execute()
        repository.plan_collection(grace=0).execute()
        assert [entry.id for entry in repository.root().versions] == [1, 3, 4]
        assert restores(repository.version(4), lora(3))
        repository.plan_compaction([3]).execute()
        assert not repository.version(3).entry.bases
        assert restores(repository.version(3), lora(2))
        assert cluster.save(lora(4), step=4).entry.bases == (1,)
        plan_repair(repository.store).execute()
        repository.plan_retention(Policy(keep_last=1)).execute()
        repository.plan_collection(grace=0).execute()
        assert restores(repository.latest(), lora(4))
        repository.verify(repository.latest())


def test_a_changed_dtype_name_or_bit_is_stored(uri: str) -> None:
    with LocalCluster(uri, delta=4) as cluster:
        first = {"a": torch.zeros(20_000), "b": torch.ones(20_000), "c": torch.full((20_000,), torch.nan)}
        cluster.save(first, step=0)
        payload = first["c"].clone()
        payload.view(torch.int32)[7] ^= 1
        other = {"a": torch.zeros(20_000, dtype=torch.int32), "renamed": first["b"], "c": payload}
        version = cluster.save(other, step=1)
        assert references(version) == {}
        again = cluster.save({name: value.clone() for name, value in other.items()}, step=2)
        assert references(again) == {"a": 2, "renamed": 2, "c": 2}
        assert torch.equal(again.read("c").view(torch.int32), payload.view(torch.int32))


def test_tensors_of_colliding_public_digests_are_both_stored(uri: str) -> None:
    """An attacker who chooses weights could otherwise make a save refer to an old chunk."""
    one, other = map(torch.from_numpy, colliding_tensors())
    states = [{"w": value, "frozen": FROZEN["layer0"]} for value in (one, other)]
    with LocalCluster(uri, delta="auto") as cluster:
        versions = [cluster.save(state, step=step) for step, state in enumerate(states)]
        assert all(restores(version, state) for version, state in zip(versions, states, strict=True))
        assert references(versions[1]) == {"frozen": 1}


def test_without_deltas_every_version_is_whole(uri: str) -> None:
    with LocalCluster(uri) as cluster:
        for step in range(2):
            assert cluster.save(lora(step), step=step).entry.bases == ()


def test_a_restarted_node_worker_stores_everything_once(uri: str) -> None:
    with LocalCluster(uri, delta="auto") as cluster:
        for step in range(2):
            cluster.save(lora(step), step=step)
        cluster.restart_node(0)
        assert cluster.save(lora(2), step=2).entry.bases == ()
        assert cluster.save(lora(3), step=3).entry.bases == (3,)


def test_parts_frozen_at_different_steps_keep_chains_short(uri: str) -> None:
    """Each version references the previous version for newly frozen parts, and older versions for the others."""
    parts = DEEPEST + 4
    with LocalCluster(uri, delta=1) as cluster:
        for step in range(2 * parts):
            generator = torch.Generator().manual_seed(step)
            state = {
                f"p{i}": torch.randn(9_000, generator=generator) if step <= 2 * i else torch.full((9_000,), i + 0.5)
                for i in range(parts)
            }
            version = cluster.save(state, step=step)
            assert all(torch.equal(version.read(name), value) for name, value in state.items())
            assert len(version.entry.bases) < DEEPEST
        cluster.repository.verify(cluster.repository.latest())


def test_references_name_the_version_that_stores_the_bytes(uri: str) -> None:
    with LocalCluster(uri, delta=1) as cluster:
        for step in range(6):
            version = cluster.save(lora(step), step=step)
        assert set(references(version).values()) == {1}
