"""The saves that a drain waits for before a node is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
import torch
from helpers.fake_clock import FakeClock
from helpers.local_cluster import LocalCluster

from raystow.orchestrator.coordinator.drain import Drained, drain
from raystow.storage.errors import ClusterError, DeadlineExceeded
from raystow.workers.node.node import Node
from raystow.workers.node.save_progress import SavesHere
from raystow.workers.protocol.messages import Saves


def looks(*states: dict[str, Saves]) -> Callable[[], dict[str, Saves]]:
    """Return a function that returns these states in order, and then always the last one."""
    answers: Iterator[dict[str, Saves]] = chain(states, repeat(states[-1]))
    return lambda: next(answers)


def nothing() -> None: ...


def test_a_drain_waits_for_a_save_that_began_after_the_notice() -> None:
    clock = FakeClock()
    under_way, late = {"run": Saves(2, 1)}, {"run": Saves(3, 2)}
    done = drain(looks(under_way, under_way, {"run": Saves(2, 2)}, late, {"run": Saves(3, 3)}), nothing, clock, seconds=60)
    assert done == Drained(durable=("run",), left=())
    assert clock.time == 1.5


def test_the_notice_is_sent_before_any_wait() -> None:
    """The drain reads the state of the cluster once before the notice."""
    calls, calls_at_notice = list[int](), list[int]()  # calls of ``saves``; the number of calls at each notice

    def saves() -> dict[str, Saves]:
        calls.append(1)
        return {"run": Saves(2, 2) if calls_at_notice else Saves(1, 1)}

    drain(saves, lambda: calls_at_notice.append(len(calls)), FakeClock(), seconds=60)
    assert calls_at_notice == [1]


def test_a_drain_does_not_wait_for_a_run_that_has_ended() -> None:
    assert drain(looks({"run": Saves(2, 2)}, {}), nothing, FakeClock(), seconds=60) == Drained(durable=(), left=("run",))


def test_a_drain_waits_for_every_repository() -> None:
    clock = FakeClock()
    both = {"a": Saves(1, 1), "b": Saves(1, 1)}
    states = looks(both, both, both | {"b": Saves(2, 2)}, both | {"b": Saves(2, 2)}, {"a": Saves(2, 2), "b": Saves(2, 2)})
    assert drain(states, nothing, clock, seconds=60) == Drained(durable=("a", "b"), left=())


def test_a_rank_without_a_save_has_30_s_to_begin() -> None:
    clock = FakeClock()
    states = looks(*[{}] * 40, {"run": Saves(1, 0)}, {"run": Saves(1, 1)})
    assert drain(states, nothing, clock, seconds=300) == Drained(durable=("run",), left=())
    assert drain(looks({}), nothing, clock := FakeClock(), seconds=300) == Drained(durable=(), left=())
    assert clock.time == 30


def test_a_drain_without_a_node_worker_ends_immediately() -> None:
    clock = FakeClock()
    assert drain(lambda: None, nothing, clock, seconds=300) == Drained(durable=(), left=())
    assert clock.time == 0


def test_the_save_counts_of_a_restarted_worker_are_handled() -> None:
    states = looks({"run": Saves(7, 7)}, {"run": Saves(1, 0)}, {"run": Saves(1, 1)})
    assert drain(states, nothing, FakeClock(), seconds=60).durable == ("run",)


def test_a_drain_waits_at_most_for_the_remaining_time() -> None:
    clock = FakeClock()
    with pytest.raises(DeadlineExceeded, match="within 60 s") as raised:
        drain(looks({"run": Saves(2, 2)}), nothing, clock, seconds=60)
    assert raised.value.subject == "run"
    assert clock.time == 60


def test_a_notice_that_ray_refuses_is_an_error() -> None:
    def refuse() -> None:
        raise ClusterError("no such node")

    with pytest.raises(ClusterError):
        drain(looks({"run": Saves(1, 1)}), refuse, FakeClock(), seconds=60)


def test_a_node_counts_the_saves_of_connected_ranks() -> None:
    with LocalCluster("memory://progress") as cluster:
        cluster.save_all([{"w": torch.ones(3)}] * 2, step=1)
        cluster.save_all([{"w": torch.ones(3)}] * 2, step=2)
        (node,) = cluster._nodes
        assert isinstance(node, Node)
        assert node.saves() == {"memory://progress": Saves(2, 2)}


def test_disconnected_ranks_are_not_counted() -> None:
    saves = SavesHere()
    with saves.rank("run"):
        with saves.rank("run"):
            saves.settle("run", saves.begin("run"))
            saves.begin("run")
        assert saves.now() == {"run": Saves(2, 1)}
    assert saves.now() == {}
