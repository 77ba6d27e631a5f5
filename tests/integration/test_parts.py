"""Actors outside the ranks save parts of the versions, on a real Ray cluster."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import raystow
from integration.ranks import Rank, every, start, take
from raystow.orchestrator.coordinator.ray_client import coordinator_name
from raystow.storage.stores import open_store
from raystow.workers.node.actor import NAMESPACE


def model(step: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step)), "step": step}


def rows(step: int) -> dict[str, Any]:
    """A state of the part whose names are also names of the ranks."""
    return {"w": np.arange(50_000) + step, "step": -step, "optim": {"m": torch.full((7,), float(step))}}


def empty() -> dict[str, Any]:
    return {"w": np.zeros(50_000, np.int64), "step": 0, "optim": {"m": torch.zeros(7)}}


def make(process: Rank, uri: str, name: str, options: dict[str, Any]) -> None:
    """Let a process have a part."""
    process.checkpointer = raystow.Part(uri, name, **options)  # type: ignore[assignment]
    process.state, process.pending = {}, []


def save(process: Rank, step: int) -> None:
    process.pending.append(process.checkpointer.save(rows(step), step=step))


def follow(process: Rank, first: int) -> raystow.BegunSave:
    """Save what the ranks save next."""
    begun: raystow.BegunSave = process.checkpointer.wait_for(first)  # type: ignore[attr-defined]
    save(process, begun.step)
    return begun


def restore(process: Rank, **options: Any) -> tuple[int | None, dict[str, Any]]:
    into = empty()
    version = process.checkpointer.restore(into, **options)
    return None if version is None else version.id, into


def cut_save(process: Rank, step: int, cut: dict[str, Any]) -> None:
    process.pending.append(process.checkpointer.save(process.state, step=step, cut=cut))


def part(uri: str, name: str = "buffer", node: str = "node_b", **options: Any) -> Any:
    process = take(node)
    ray.get(process.do.remote(make, uri, name, options))
    return process


def do(process: Any, what: Any, *args: Any) -> Any:
    return ray.get(process.do.remote(what, *args), timeout=120)


def test_a_version_needs_all_declared_parts(cluster: Cluster, uri: str) -> None:
    ranks, buffer = start(uri, 2, parts=("buffer", "rollouts")), part(uri)
    every(ranks, "set", model, 5)
    do(buffer, save, 5)  # before the ranks
    every(ranks, "save", 5)
    rollouts = part(uri, "rollouts", "node_a")
    assert do(rollouts, follow, 0).step == 5
    versions = every([*ranks, buffer, rollouts], "result")
    assert len({version.id for version in versions}) == 1
    version = raystow.open(uri).version(1)
    assert version.parts() == {"buffer": 400_028, "rollouts": 400_028}
    assert version.tensors()["[part buffer].w"].group == "parts"
    assert version.values()["step"] == 5
    assert version.read("[part rollouts].step") == -5
    assert np.array_equal(version.read("[part buffer].w"), rows(5)["w"])

    restored = [rank.restore.remote() for rank in ranks]
    for id, into in ray.get([part.do.remote(restore) for part in (buffer, rollouts)], timeout=120):
        assert id == 1
        assert np.array_equal(into["w"], rows(5)["w"])
        assert (into["step"], into["optim"]["m"][0]) == (-5, 5.0)
    assert [one.id for one in ray.get(restored)] == [1, 1]


def test_a_part_is_told_the_step_and_the_cut(cluster: Cluster, uri: str) -> None:
    (rank,), buffer = start(uri, 1, parts=("buffer",)), part(uri)
    told = buffer.do.remote(follow, 3)
    ray.get(rank.set.remote(model, 4))
    do(rank, cut_save, 4, {"samples": 81920})
    assert ray.get(told, timeout=60) == raystow.BegunSave(4, {"samples": 81920})
    assert ray.get(rank.result.remote()).parts() == {"buffer": 400_028}


def test_a_step_that_no_rank_saves_is_in_no_version(cluster: Cluster, uri: str) -> None:
    (rank,), buffer = start(uri, 1, parts=("buffer",)), part(uri)
    do(buffer, save, 3)
    ray.get(rank.set.remote(model, 4))
    ray.get(rank.save.remote(4))
    with pytest.raises(raystow.SaveFailed, match=r"part 'buffer', save of step 3.*gone on to step 4"):
        ray.get(buffer.result.remote(), timeout=60)
    do(buffer, save, 4)
    assert ray.get(rank.result.remote()).step == 4


def test_a_part_that_is_not_declared_is_refused(cluster: Cluster, uri: str) -> None:
    (rank,), buffer = start(uri, 1), part(uri)
    ray.get(rank.set.remote(model, 4))
    ray.get(rank.save.remote(4))
    ray.get(rank.result.remote())
    with pytest.raises(raystow.DeadlineExceeded, match="part 'buffer'"):
        do(buffer, wait_briefly)


def wait_briefly(process: Rank) -> None:
    process.checkpointer.wait_for(5, timeout=0.5)  # type: ignore[attr-defined]


def failed_save(process: Rank) -> tuple[str, tuple[str, ...]]:
    """Return the reason why the oldest save failed, and its warnings."""
    pending = process.pending.pop(0)
    with pytest.raises(raystow.SaveFailed) as failure:
        pending.result(60)
    return str(failure.value), pending.warnings


def die(process: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_part_that_dies_is_named_and_its_successor_is_restored(cluster: Cluster, uri: str) -> None:
    """On another node. The training goes on, and no version lacks a part."""
    (rank,), buffer = start(uri, 1, parts=("buffer",), timeout=20.0, on_failure="warn"), part(uri)
    ray.get(rank.set.remote(model, 1))
    ray.get(rank.save.remote(1))
    do(buffer, follow, 1)
    assert ray.get(rank.result.remote()).step == 1
    with pytest.raises(ray.exceptions.RayError):
        do(buffer, die)
    ray.get(rank.set.remote(model, 2))
    ray.get(rank.save.remote(2))
    with pytest.raises(raystow.SaveFailed, match="part 'buffer'"):
        ray.get(rank.result.remote(), timeout=60)

    successor = part(uri, node="node_a")
    restored = rank.restore.remote()
    id, into = do(successor, restore)
    assert (id, into["step"]) == (1, -1)
    assert ray.get(restored).id == 1
    ray.get(rank.save.remote(3))
    do(successor, follow, 2)
    assert [version.step for version in (ray.get(rank.result.remote()), *raystow.open(uri).versions())] == [3, 1, 3]


@pytest.mark.long
def test_a_part_that_hangs_in_wait_for_is_named(cluster: Cluster, uri: str) -> None:
    """At half of the timeout and when the save fails. When it goes on, it learns that its step is in no version."""
    options = {"timeout": 10.0, "on_failure": "warn"}
    (rank,), buffer = start(uri, 1, parts=("buffer",), **options), part(uri, **options)
    with pytest.raises(raystow.DeadlineExceeded):
        do(buffer, wait_briefly)
    pid = ray.get(buffer.pid.remote())
    waits = buffer.do.remote(follow, 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        for step in 1, 2:
            ray.get(rank.set.remote(model, step))
            ray.get(rank.save.remote(step))
            error, warnings = do(rank, failed_save)
            assert "part 'buffer' had not delivered their shards after 10 s" in error
            assert any(f"part 'buffer' (process {pid}" in text and "has not called save" in text for text in warnings)
    finally:
        os.kill(pid, signal.SIGCONT)
    ray.get(rank.save.remote(3))
    step = ray.get(waits, timeout=60).step
    while step < 3:
        with pytest.raises(raystow.SaveFailed, match=r"part 'buffer', save of step \d: the ranks have (given it up|gone on)"):
            ray.get(buffer.result.remote(), timeout=60)
        step = do(buffer, follow, step + 1).step
    assert ray.get(rank.result.remote(), timeout=60).step == 3


def test_a_coordinator_that_dies_between_parts_commits_no_half(cluster: Cluster, uri: str) -> None:
    (rank,) = start(uri, 1, parts=("buffer", "rollouts"), timeout=60.0, on_failure="warn")
    buffer, rollouts = part(uri, timeout=60.0, on_failure="warn"), part(uri, "rollouts", timeout=60.0, on_failure="warn")
    ray.get(rank.set.remote(model, 1))
    ray.get(rank.save.remote(1))
    do(buffer, follow, 1)
    coordinator = ray.get_actor(coordinator_name(open_store(uri).uri), NAMESPACE)
    ray.kill(coordinator, no_restart=False)
    with pytest.raises(raystow.RaystowError):
        ray.get(rank.result.remote(), timeout=100)
    ray.get(rank.save.remote(2))
    for process in buffer, rollouts:
        do(process, follow, 2)
    assert ray.get(rank.result.remote(), timeout=100).step == 2
    assert [(one.step, {*one.parts()}) for one in raystow.open(uri).versions()] == [(2, {"buffer", "rollouts"})]


def test_the_second_actor_of_a_part_fences_the_first(cluster: Cluster, uri: str) -> None:
    (rank,), first = start(uri, 1, parts=("buffer",)), part(uri)
    with pytest.raises(raystow.DeadlineExceeded):
        do(first, wait_briefly)
    waits = first.do.remote(follow, 0)
    second = part(uri, node="node_a")
    with pytest.raises(raystow.DeadlineExceeded):
        do(second, wait_briefly)
    with pytest.raises(raystow.Fenced, match="part 'buffer'"):
        ray.get(waits, timeout=60)
    ray.get(rank.set.remote(model, 1))
    ray.get(rank.save.remote(1))
    do(second, follow, 0)
    assert ray.get(rank.result.remote()).step == 1


@pytest.mark.long
def test_a_replaced_part_is_refused_by_the_next_coordinator(cluster: Cluster, uri: str) -> None:
    """Its successor has restored with the rank, and has not called that coordinator yet."""
    (rank,), former = start(uri, 1, parts=("buffer",)), part(uri)
    restored = rank.restore.remote()
    assert do(former, restore)[0] is ray.get(restored) is None
    ray.get(rank.set.remote(model, 1))
    ray.get(rank.save.remote(1))
    do(former, save, 1)
    assert [version.id for version in every([rank, former], "result")] == [1, 1]
    successor = part(uri)
    restored = rank.restore.remote()
    assert do(successor, restore)[0] == ray.get(restored).id == 1
    ray.kill(ray.get_actor(coordinator_name(open_store(uri).uri), NAMESPACE), no_restart=False)
    ray.get(rank.set.remote(model, 2))
    ray.get(rank.save.remote(2))
    do(former, save, 2)
    assert "it has not restored together with the ranks" in do(former, failed_save)[0]
    do(successor, save, 2)
    assert {version.step for version in every([rank, successor], "result")} == {2}


@pytest.mark.long
def test_a_part_does_not_complete_a_save_before_its_restore(cluster: Cluster, uri: str) -> None:
    """The rank has delivered step 2 and died; the part, whose process lives, restores step 1 with the next rank."""
    (rank,), buffer = start(uri, 1, parts=("buffer",), timeout=60), part(uri)
    ray.get(rank.set.remote(model, 1))
    ray.get(rank.save.remote(1))
    do(buffer, save, 1)
    assert [version.id for version in every([rank, buffer], "result")] == [1, 1]
    ray.get(rank.save.remote(2))
    ray.get(rank.do.remote(lambda process: process.pending[-1].staged(60)))
    ray.kill(rank)
    (rank,) = start(uri, 1, parts=("buffer",), timeout=60)
    ray.get(rank.set.remote(model, 0))
    restored = rank.restore.remote()
    assert do(buffer, restore)[0] == ray.get(restored).id == 1
    with pytest.raises(raystow.DeadlineExceeded, match="the ranks have not begun to save step 0"):
        do(buffer, lambda process: process.checkpointer.wait_for(0, timeout=2))
    do(buffer, save, 2)
    ray.get(rank.set.remote(model, 2))
    ray.get(rank.save.remote(2))
    versions = [ray.get(one.result.remote(), timeout=60) for one in (rank, buffer)]
    assert len({version.id for version in versions}) == 1
    assert versions[0].step == 2
